"""Which weights these are: KV of others must not be taken for theirs, whatever the model is called."""

from __future__ import annotations

import hashlib

import torch

_SAMPLES = 64  # values of every parameter: reading all of a large model would take minutes


def weights_digest(model: torch.nn.Module) -> str:
    """A digest of names, shapes and evenly spread values of all parameters, 16 hex digits."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        sample = flat[::step][:_SAMPLES].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
