"""
What matters of vLLM's model to KV that is stored: the frequencies it rotates keys with, and its weights.

Frequencies are read from vLLM's own modules; which layer uses which is tried by the self-test. KV of other
weights must not be taken for the model's own, whatever the model is called.
"""

from __future__ import annotations

import hashlib

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from kvshare.kv.frequencies import frequency_tables as transformers_tables

# Kinds whose keys are rotated by position times one fixed table of frequencies. Others (dynamic NTK, tables
# chosen by length, M-RoPE) are not moved.
_PLAIN = ("RotaryEmbedding", "Llama3RotaryEmbedding")
_KNOWN = (*_PLAIN, "LinearScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding")
_SAMPLES = 64  # values of every parameter: reading all of a large model would take minutes


def frequency_tables(model: torch.nn.Module) -> tuple[list[torch.Tensor], str]:
    """
    All fixed tables of the model, (F,) each, and what is said of others.

    Models that vLLM runs in their transformers form have modules of that kind.
    """
    tables, refused = transformers_tables(model)
    refused = refused or "the model has no rotary embedding"
    for module in model.modules():
        if not isinstance(module, RotaryEmbeddingBase):
            continue
        kind = type(module).__name__
        if kind in _KNOWN:
            tables.append(_frequencies(module))
        else:
            refused = f"keys rotated by {kind} cannot be moved"
    return tables, refused


def _frequencies(module: RotaryEmbeddingBase) -> torch.Tensor:
    """
    Angle per position of every pair of dimensions, (F,) float32.

    From row 1 of the table that the module computes in float32 (the one it keeps has the model's dtype): no
    frequency exceeds 1, so the angle of position 1 is the frequency. A magnitude factor cancels out.
    """
    if type(module).__name__ in _PLAIN:
        frequencies: torch.Tensor = module._compute_inv_freq(module.base)
        return frequencies.float().cpu()
    cos, sin = module._compute_cos_sin_cache()[1].double().cpu().chunk(2)
    return torch.atan2(sin, cos).float()


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
