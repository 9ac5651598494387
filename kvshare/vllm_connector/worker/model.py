"""
What matters of vLLM's model to KV that is stored: how it rotates keys, and which weights it has.

Rotary frequencies are read from vLLM's own module. KV of other weights must not be taken for the model's own,
whatever the model is called.
"""

from __future__ import annotations

import hashlib

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from kvshare.kv.rotation import Rotation

# Kinds whose keys are rotated by position times one fixed table of frequencies. Others (dynamic NTK, tables
# chosen by length, M-RoPE) are not moved.
_PLAIN = ("RotaryEmbedding", "Llama3RotaryEmbedding")
_KNOWN = (*_PLAIN, "LinearScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding")
_SAMPLES = 64  # values of every parameter: reading all of a large model would take minutes


def find_rotation(model: torch.nn.Module, *, head_dim: int) -> tuple[Rotation | None, str]:
    """
    How keys of this model move, or None and why they cannot be moved.

    Whether every layer really rotates like that is for `self_test` to find out.
    """
    modules = [module for module in model.modules() if isinstance(module, RotaryEmbeddingBase)]
    if not modules:
        return None, "the model has no rotary embedding"
    tables = []
    for module in modules:
        kind = type(module).__name__
        if kind not in _KNOWN:
            return None, f"keys rotated by {kind} cannot be moved"
        if not module.is_neox_style:
            return None, "interleaved rotary embeddings cannot be moved"
        if module.rotary_dim != head_dim:
            return None, f"only {module.rotary_dim} of {head_dim} head dimensions are rotated"
        tables.append(_frequencies(module))
    if any(not torch.equal(table, tables[0]) for table in tables):
        return None, "the layers rotate with different frequencies"
    return Rotation(tables[0]), ""


def rope_digest(rotation: Rotation | None) -> str:
    """For the namespace: KV of other frequencies is other KV."""
    if rotation is None:
        return "unknown"
    return hashlib.sha256(rotation.inverse_frequencies.cpu().numpy().tobytes()).hexdigest()[:16]


def _frequencies(module: RotaryEmbeddingBase) -> torch.Tensor:
    """
    Angle per position of every pair of dimensions, (D / 2,) float32.

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
