"""Random-weight models on disk, as vLLM wants them: one large enough to time, one small and talkative."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging

from kvshare.bench.random_models import timing_model
from kvshare.demo import MODEL_PATH

VOCAB_SIZE = 1536  # the demo tokenizer's, which serves every model here
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
_SMALL_STD = (
    0.08  # so large that attention is far from uniform and the next token depends on the whole prompt
)


def write_timing_model(folder: Path, *, dtype: str, max_model_len: int, seed: int = 0) -> Path:
    """A Llama of about 100 M parameters. Returns its folder."""
    model = timing_model(max_position_embeddings=max_model_len, vocab_size=VOCAB_SIZE, seed=seed)
    return _write(model, folder, dtype)


def write_small_model(folder: Path, *, dtype: str, max_model_len: int, seed: int = 0) -> Path:
    """A Llama of about 3 M parameters whose answers depend on the whole prompt. Returns its folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_model_len,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # no types
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, _SMALL_STD)
    return _write(model, folder, dtype)


def _write(model: PreTrainedModel, folder: Path, dtype: str) -> Path:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # no types
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for name in _FILES:
        shutil.copy(MODEL_PATH / name, folder)
    return folder


def timing_bytes_per_token(dtype: str) -> int:
    """K and V of one token of the timing model, all layers."""
    config = timing_model(max_position_embeddings=64, vocab_size=64).config
    width = config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * width * getattr(torch, dtype).itemsize)
