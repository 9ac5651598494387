"""
Reads rotary frequencies, and a fingerprint of the weights, from a model's own parameters.

`kvshare.kv.movement` finds which layer uses which frequencies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

# Rope types whose frequencies change with the length of the sequence: no single table fits a stored row.
_CHANGING = frozenset({"dynamic", "longrope"})


def frequency_tables(model: torch.nn.Module) -> tuple[list[torch.Tensor], str]:
    """
    Return all fixed tables of the model, (F,) each, and why others are unsupported; empty if all are fixed.

    Modules with one table for each layer type (Gemma 3) name each buffer after its type.
    """
    tables, unsupported = [], ""
    for _, kind, table in _tables(model):
        if kind in _CHANGING:
            unsupported = f"rope type {kind!r} changes its frequencies with the length of the prompt"
        else:
            tables.append(table)
    return tables, unsupported


def rope_digest(model: torch.nn.Module) -> str:
    """Digest of all rotary frequencies and of their scaling."""
    digest = hashlib.sha256()
    for scaling, _, table in _tables(model):
        digest.update(table.detach().float().cpu().contiguous().numpy().tobytes() + scaling.encode())
    return digest.hexdigest()


def _tables(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Yield the scaling, the rope type and the frequencies of each table."""
    for module in model.modules():
        for name, table in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or "original" in name:
                continue
            layer_type = name.removesuffix("inv_freq").rstrip("_")
            scaling = getattr(module, f"{layer_type}_attention_scaling".lstrip("_"), 1.0)
            kind = getattr(module, "rope_type", "default")
            if isinstance(kind, dict):
                kind = kind.get(layer_type, "default")
            yield str(scaling), str(kind), table


def model_fingerprint(named: Iterable[tuple[str, torch.Tensor]], *, num_layers: int, head_dim: int) -> str:
    """
    Hash a model's norms, number of layers and head dimension: 32 hex digits, the same on all ranks of vLLM.

    Every model has norms. They are whole on every rank, equal in most quantised copies, and any training
    changes them. They are hashed in bfloat16, whatever the model's dtype. The hash can be forged, which is
    harmless: it selects the calibration of a prediction, never KV.
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
    return "norm" in name
