"""Reads a model's fingerprint, heads and rotation from its files, without loading all weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from kvshare.errors import ModelError
from kvshare.kv.parameters import frequency_tables, is_norm, model_fingerprint


def head_dim_of(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def may_move_keys(path: str | Path) -> bool:
    """
    Return whether a model's keys can probably be moved, by its modules alone. Loads no weights.

    A server verifies that by computing.
    Raises:  ModelError if the configuration cannot be read
    """
    try:
        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # no annotations
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise ModelError(f"the configuration of model {str(path)!r} cannot be read: {exc}") from exc
    return bool(frequency_tables(model)[0])


def stored_fingerprint(path: str) -> str:
    """
    Return the fingerprint that the model of this folder or Hugging Face name has when it is served.

    Empty if the weights are not on this machine, or are not in safetensors.
    """
    try:
        config = AutoConfig.from_pretrained(path)
        return model_fingerprint(
            _norms(path), num_layers=int(config.num_hidden_layers), head_dim=head_dim_of(config)
        )
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError):
        return ""


def _norms(path: str) -> Iterator[tuple[str, torch.Tensor]]:
    for file in _weight_files(path):
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  not a mapping
                if is_norm(name):
                    yield name, weights.get_tensor(name)


def _weight_files(path: str) -> list[Path]:
    """Return the files of weights. Raises OSError if one is missing."""
    index = _find(path, SAFE_WEIGHTS_INDEX_NAME)
    names = [SAFE_WEIGHTS_NAME]
    if index is not None:
        names = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    files = [_find(path, name) for name in names]
    if None in files:
        raise FileNotFoundError(f"{path}: no weights in safetensors are on this machine")
    return [file for file in files if file is not None]


def _find(path: str, name: str) -> Path | None:
    found = cached_file(path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
