"""Loads the model that is served, from a folder or by its Hugging Face name."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedModel

from kvshare.engines.embedded.decoder import load_network
from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.engines.embedded.unshared import UnsharedModel
from kvshare.errors import UnshareableError


def load_served(
    path: str | Path,
    *,
    name: str,
    device: str = "auto",
    dtype: str = "float32",
    max_model_len: int | None = None,
) -> EmbeddedModel | UnsharedModel:
    """Load a Hugging Face name or folder, see `load_network`. Raises ModelError."""
    return served(load_network(path, device=device, dtype=dtype), name=name, max_model_len=max_model_len)


def served(
    network: PreTrainedModel, *, name: str, max_model_len: int | None = None
) -> EmbeddedModel | UnsharedModel:
    """With sharing if the model supports it, else without. Raises ModelError if neither works."""
    attention = network.config._attn_implementation
    try:
        return EmbeddedModel(network, name=name, max_model_len=max_model_len)
    except UnshareableError as exc:
        network.set_attn_implementation(attention)
        return UnsharedModel(network, name=name, why=str(exc), max_model_len=max_model_len)
