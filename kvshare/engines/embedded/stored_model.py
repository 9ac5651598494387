"""The fingerprint of a model from its files, without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from kvshare.engines.embedded.rotary import head_dim_of
from kvshare.kv.fingerprint import is_norm, model_fingerprint


def stored_fingerprint(path: str) -> str:
    """
    The fingerprint that the model of this folder or Hugging Face name has when it is served.

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
    """Raises OSError if there are none."""
    index = _find(path, SAFE_WEIGHTS_INDEX_NAME)
    names = [SAFE_WEIGHTS_NAME]
    if index is not None:
        names = sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    found = [_find(path, name) for name in names]
    if None in found:
        raise FileNotFoundError(f"{path}: no weights in safetensors are on this machine")
    return [file for file in found if file is not None]


def _find(path: str, name: str) -> Path | None:
    found = cached_file(path, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)
