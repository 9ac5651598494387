"""A tiny Llama with random weights, and answers to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from kvshare_lab.drafting.answers import Sample, answered, samples
from lab.tests.tiny_llama import tiny_llama

NUM_ANSWER = 12


@pytest.fixture(scope="session")
def llama() -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama(4, tie_word_embeddings=True)).requires_grad_(False)
    for name, rows in model.named_parameters():
        if "norm" not in name:
            rows.normal_(0.0, 0.4)  # or its answers were one word
    return model


@pytest.fixture(scope="session")
def learned(llama: Any) -> Sequence[Sample]:
    prompts = [[3 + (number * place) % 50 for place in range(8 + number)] for number in range(4)]
    return samples(llama, answered(llama, prompts, NUM_ANSWER), context=6, aux_layers=(1, 2, 3))
