"""How a model of transformers rotates its keys, as far as its modules tell; `EmbeddedModel` tries it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvshare.errors import ModelError, UnsupportedGeometryError
from kvshare.kv.rotation import Rotation

# Frequencies that never change with the length of the sequence. Dynamic NTK and LongRoPE do change.
_FIXED_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


def rotary_module(model: torch.nn.Module) -> torch.nn.Module | None:
    """The module with the model's frequency table; None where there is none."""
    return next(
        (m for m in model.modules() if hasattr(m, "inv_freq") and hasattr(m, "attention_scaling")), None
    )


def head_dim_of(config: Any) -> int:
    """Dimensions of a head, from a model's configuration."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def find_rotation(model: torch.nn.Module, *, head_dim: int) -> Rotation:
    """The model's rotation. Raises UnsupportedGeometryError if it is of a kind that is not handled."""
    module = rotary_module(model)
    if module is None:
        raise UnsupportedGeometryError("no rotary embedding with one frequency table was found")
    rope_type = str(getattr(module, "rope_type", "unknown"))
    if rope_type not in _FIXED_ROPE:
        expected = ", ".join(sorted(_FIXED_ROPE))
        raise UnsupportedGeometryError(f"rope type {rope_type!r} is not handled; handled: {expected}")
    rotation = Rotation(torch.as_tensor(module.inv_freq))
    if rotation.head_dim != head_dim:
        raise UnsupportedGeometryError(
            f"{rotation.head_dim} of {head_dim} dimensions of a head rotate, expected all"
        )
    return rotation


def can_move_keys(path: str | Path) -> bool:
    """
    Whether the keys of a model can be moved, from its modules alone: no weights are loaded.

    A server finds out more by computing: in a few models (SmolLM3) only some of the layers rotate.
    Raises:  ModelError if the configuration cannot be read
    """
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # no annotations
        find_rotation(model, head_dim=head_dim_of(config))
    except UnsupportedGeometryError:
        return False
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(f"the configuration of model {str(path)!r} cannot be read: {exc}") from exc
    return True
