"""A fingerprint of a model, the same from transformers and from every rank of vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def model_fingerprint(named: Iterable[tuple[str, torch.Tensor]], *, num_layers: int, head_dim: int) -> str:
    """
    Digest of a model's norms, layers and head dimension, 32 hex digits.

    Every model has norms. They are whole on every rank, equal in most quantised copies, and any training
    changes them. They are compared in bfloat16, whatever dtype the model computes in. The digest can be
    forged, which is harmless: it selects the calibration of a prediction, never KV.
    Shapes:  any; only vectors with "norm" in their name count
    """
    digest = hashlib.sha256(f"{num_layers}x{head_dim}".encode())
    norms = (entry for entry in named if is_norm(entry[0]) and entry[1].dim() == 1)
    for name, tensor in sorted(norms, key=lambda entry: entry[0]):
        values = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        digest.update(f"{name.removeprefix('model.')}:{len(values)}:".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:32]


def is_norm(name: str) -> bool:
    """Whether a parameter of this name may belong to a norm."""
    return "norm" in name
