"""Writes a trained head for vLLM: a folder of its own, or for MTP a whole model with its layer."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, LlamaConfig

from kvshare_lab.drafting.networks import Eagle3Head, Head
from kvshare_lab.vllm.heads import write_eagle3_head, write_head
from kvshare_lab.vllm.mtp import write_as_ernie

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write(kind: str, head: Head | Eagle3Head, words: Tensor, target: Path, folder: Path) -> None:
    """`words`: the numbers of the words that an EAGLE3 head can draft."""
    weights = {name: rows.float() for name, rows in head.weights().items()}
    if kind == "eagle3":
        write_eagle3_head(weights, words, target, folder)
    elif kind == "eagle":
        write_head(weights, target, folder)
    else:
        config: LlamaConfig = AutoConfig.from_pretrained(target)
        own = {name: rows.float() for name, rows in load_file(target / "model.safetensors").items()}
        write_as_ernie(own, config, weights, folder)
        for name in _TOKENIZER:
            if (target / name).exists():
                shutil.copy(target / name, folder)
