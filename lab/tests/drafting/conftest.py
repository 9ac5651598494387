"""A tiny Llama with random weights, and answers to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvshare_lab.drafting.answers import Sample, answered, samples

NUM_ANSWER = 12


@pytest.fixture(scope="session")
def llama() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).requires_grad_(False)
    for name, rows in model.named_parameters():
        if "norm" not in name:
            rows.normal_(0.0, 0.4)  # or its answers were one word
    return model


@pytest.fixture(scope="session")
def learned(llama: Any) -> Sequence[Sample]:
    prompts = [[3 + (number * place) % 50 for place in range(8 + number)] for number in range(4)]
    return samples(llama, answered(llama, prompts, NUM_ANSWER), context=6, aux_layers=(1, 2, 3))
