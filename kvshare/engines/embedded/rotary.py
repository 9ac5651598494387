"""The heads of a model and their rotation, from its configuration, without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from kvshare.errors import ModelError
from kvshare.kv.frequencies import frequency_tables


def head_dim_of(config: Any) -> int:
    """Dimensions of a head, from a model's configuration."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def may_move_keys(path: str | Path) -> bool:
    """
    Whether a model may have keys that can be moved. Looks at its modules only and loads no weights.

    A server verifies it by computing.
    Raises:  ModelError if the configuration cannot be read
    """
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # no annotations
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(f"the configuration of model {str(path)!r} cannot be read: {exc}") from exc
    return bool(frequency_tables(model)[0])
