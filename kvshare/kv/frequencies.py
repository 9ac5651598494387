"""The frequency tables of a model's own modules. `kvshare.kv.movement` finds which layer uses which."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

# Rope types whose frequencies change with the length of the sequence: no single table fits a stored row.
_CHANGING = frozenset({"dynamic", "longrope"})


def frequency_tables(model: torch.nn.Module) -> tuple[list[torch.Tensor], str]:
    """
    All fixed tables of the model, (F,) each, and why others are unsupported; empty where all are fixed.

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
    """The scaling, the rope type and the frequencies of each table."""
    for module in model.modules():
        for name, table in module.named_buffers(recurse=False):
            if not name.endswith("inv_freq") or "original" in name:
                continue
            layer_type = name.removesuffix("inv_freq").rstrip("_")
            yield (
                str(getattr(module, f"{layer_type}_attention_scaling".lstrip("_"), 1.0)),
                str(_of_type(getattr(module, "rope_type", "default"), layer_type)),
                table,
            )


def _of_type(kinds: Any, layer_type: str) -> Any:
    return kinds.get(layer_type, "default") if isinstance(kinds, dict) else kinds
