"""Which model this is, told alike by transformers and by every rank of vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch


def model_fingerprint(named: Iterable[tuple[str, torch.Tensor]], *, num_layers: int, head_dim: int) -> str:
    """
    Digest of a model's norms, layers and head dimension, 32 hex digits.

    Norms are in every model, whole on every rank, the same in most quantised copies, and moved by any
    training. They are compared in bfloat16, whatever the model computes in. No proof against forgery: it
    picks weights for a prediction, never KV.
    Shapes:  any; only vectors whose name holds "norm" count
    """
    digest = hashlib.sha256(f"{num_layers}x{head_dim}".encode())
    norms = (entry for entry in named if is_norm(entry[0]) and entry[1].dim() == 1)
    for name, tensor in sorted(norms, key=lambda entry: entry[0]):
        values = tensor.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
        digest.update(f"{name.removeprefix('model.')}:{len(values)}:".encode())
        digest.update(values.numpy().tobytes())
    return digest.hexdigest()[:32]


def is_norm(name: str) -> bool:
    """Whether a parameter of this name may be a norm's."""
    return "norm" in name
