"""Random-weight models on disk, as vLLM wants them: one large enough to time, one small and talkative."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from kvshare.bench.random_models import llama, llama_config
from kvshare.demo import MODEL_PATH

VOCAB_SIZE = 1536  # the demo tokenizer's, which serves every model here
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_model(name: str, folder: Path, *, dtype: str, max_model_len: int, seed: int = 0) -> Path:
    """The "timing" or the "small" model. Returns its folder."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # no types
    model = llama(name, max_position_embeddings=max_model_len, vocab_size=VOCAB_SIZE, seed=seed)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for file in _FILES:
        shutil.copy(MODEL_PATH / file, folder)
    return folder


def timing_bytes_per_token(dtype: str) -> int:
    """K and V of one token of the timing model, all layers."""
    config: Any = llama_config("timing", max_position_embeddings=64, vocab_size=64)
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * width * getattr(torch, dtype).itemsize)
