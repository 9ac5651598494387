"""
What stored KV depends on in vLLM's model: the frequencies that rotate its keys, and its weights.

Frequencies are read from vLLM's own modules; the self-test tries out which layer uses which. The digest of
the weights keeps KV of different weights apart, even if the models have the same name.
"""

from __future__ import annotations

import hashlib

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

from kvshare.kv.parameters import frequency_tables as transformers_tables
from kvshare.vllm_connector.worker.cache_dtype import EIGHT_BITS, scale_of, stored_dtype

# Kinds that rotate keys by position times one fixed table of frequencies; M-RoPE does if all positions of a
# token are equal, as in text. Keys of other kinds (dynamic NTK, tables chosen by length) are not moved.
_PLAIN = ("RotaryEmbedding", "Llama3RotaryEmbedding", "Gemma4RotaryEmbedding")
_ROWS = (
    *("MRotaryEmbedding", "MRotaryEmbeddingInterleaved"),
    *("Ernie4_5_VLRotaryEmbedding", "BailingMRotaryEmbedding"),
)
_KNOWN = (*_PLAIN, *_ROWS, "LinearScalingRotaryEmbedding", "YaRNScalingRotaryEmbedding")
_SAMPLES = 64  # values of every parameter: reading all of a large model would take minutes


def frequency_tables(model: torch.nn.Module) -> tuple[list[torch.Tensor], str]:
    """
    Return all fixed frequency tables of the model, (F,) each, and why other keys cannot be moved.

    Models that vLLM runs through transformers have modules of transformers.
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
    Return the angle per position of every pair of dimensions, (F,) float32.

    Scaled ones are taken from row 1 of the table that the module computes in float32 (its own buffer has the
    model's dtype): no frequency exceeds 1, so the angle at position 1 is the frequency. A magnitude factor
    cancels out.
    """
    if type(module).__name__ in (*_PLAIN, *_ROWS) and getattr(module, "scaling_factor", None) is None:
        frequencies: torch.Tensor = module._compute_inv_freq(module.base)
        return frequencies.float().cpu()
    cos, sin = module._compute_cos_sin_cache()[1].double().cpu().chunk(2)
    return torch.atan2(sin, cos).float()


def loaded_parameters(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return all parameters sorted by name, without those of parts for media that vLLM did not load."""
    return sorted((name, each) for name, each in model.named_parameters() if not each.is_meta)


def weights_digest(model: torch.nn.Module) -> str:
    """
    Hash names, shapes, dtypes and evenly spread values of all loaded parameters, and the scales of a cache of
    8 bits. Returns 16 hex digits.
    """
    digest = hashlib.sha256()
    for name, module in model.named_modules():
        if hasattr(module, "kv_cache") and stored_dtype(module) in EIGHT_BITS:
            scales = torch.cat([scale_of(module, plane).cpu() for plane in "kv"])
            digest.update(f"{name}{stored_dtype(module)}{scales.tolist()}".encode())
    for name, parameter in loaded_parameters(model):
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        flat = parameter.detach().reshape(-1)
        step = max(1, flat.numel() // _SAMPLES)
        sample = flat[::step][:_SAMPLES].contiguous().cpu()
        digest.update(sample.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
