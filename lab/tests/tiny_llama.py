"""The size of a Llama that is made and computed in no time."""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig


def tiny_llama(num_layers: int, **changes: Any) -> LlamaConfig:
    """A configuration of 60 words. Its weights are drawn by whoever makes the model."""
    return LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=num_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=128,
        **changes,
    )
