"""
Models with random weights, made on the fly: tiny ones of every architecture, and Llamas (on disk too, as vLLM
wants them), of which some are large enough to time and one is small, with answers that depend on the whole
prompt. Their configurations are in random_configurations.py.
"""

import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from kvshare.demo import MODEL_PATH
from kvshare.embedded.stored_model import head_dim_of
from kvshare.errors import ConfigError
from kvshare_lab.bench.large_models import write_by_layer
from kvshare_lab.bench.random_configurations import (
    LARGE_LLAMAS,
    OTHERS,
    PLAIN,
    SMALL_LLAMAS,
    TIMED,
    TINY,
    ByName,
)

VOCAB_SIZE: int = TINY["vocab_size"]
LLAMAS: ByName = {**SMALL_LLAMAS, **LARGE_LLAMAS}

_TIED = ("timing", "long")  # their output layer is the embedding
DEMO_VOCAB_SIZE = 1536  # of the demo model's tokenizer, which every model on disk gets
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

ARCHITECTURES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    name: partial(AutoConfig.for_model, **{**TINY, **fields}) for name, fields in {**PLAIN, **OTHERS}.items()
}


def tiny_model(
    name: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, max_position_embeddings: int = 1024
) -> PreTrainedModel:
    """A model of an architecture, whose answers depend on the whole prompt."""
    config = ARCHITECTURES[name]()
    config.max_position_embeddings = max_position_embeddings
    tiny = _built(config, seed, std=0.12)
    tiny.to(dtype)  # type: ignore[arg-type]  # wrapped without types
    return tiny


def llama_config(size: str, *, max_position_embeddings: int, vocab_size: int) -> LlamaConfig:
    """Of one of LLAMAS."""
    return LlamaConfig(
        **LLAMAS[size],
        vocab_size=vocab_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=size in _TIED,
        eos_token_id=None,
    )


def llama(size: str, *, max_position_embeddings: int, vocab_size: int, seed: int = 0) -> PreTrainedModel:
    """The answers of "small" depend on the whole prompt; the others are large enough to time."""
    config = llama_config(size, max_position_embeddings=max_position_embeddings, vocab_size=vocab_size)
    return _built(config, seed, std=0.08 if size == "small" else None)


def timing_model(family: str = "llama", *, prompt_tokens: int, seed: int = 0) -> PreTrainedModel:
    """The "timing" Llama, or another family in its size, with windows of 1,024 tokens. Raises ConfigError."""
    sizes: dict[str, Any] = {"max_position_embeddings": prompt_tokens + 64, "vocab_size": 16_384}
    if family == "llama":
        return llama("timing", seed=seed, **sizes)
    if family not in TIMED:
        raise ConfigError("--family", f"expected llama or one of {', '.join(TIMED)}, got {family!r}")
    config = AutoConfig.for_model(**{**TINY, **OTHERS[family], **LLAMAS["timing"], **TIMED[family], **sizes})
    return _built(config, seed)


def _built(config: PreTrainedConfig, seed: int, *, std: float | None = None) -> PreTrainedModel:
    """With a `std`, weights are so large that attention is far from uniform."""
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).train(False)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if std is not None and "norm" not in name:  # biases too: Qwen2's are zero by default
                parameter.normal_(0.0, 1.0 if "sinks" in name else std)
    return model


def write_model(name: str, folder: Path, *, dtype: str, max_model_len: int, seed: int = 0) -> Path:
    """Write one of LLAMAS and the demo tokenizer. Returns the folder."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # no types
    if name in LARGE_LLAMAS:
        config = llama_config(name, max_position_embeddings=max_model_len, vocab_size=DEMO_VOCAB_SIZE)
        write_by_layer(config, folder, dtype=dtype, seed=seed)
    else:
        model = llama(name, max_position_embeddings=max_model_len, vocab_size=DEMO_VOCAB_SIZE, seed=seed)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
    copy_tokenizer(folder)
    return folder


def copy_tokenizer(folder: Path) -> None:
    """The demo model's, with its template."""
    for file in _FILES:
        shutil.copy(MODEL_PATH / file, folder)


def kv_bytes_per_token(config: PreTrainedConfig, dtype: str) -> int:
    """K and V of one token, all layers."""
    layers = config.get_text_config().per_layer_config
    heads = [getattr(own, "num_key_value_heads", None) or own.num_attention_heads for own in layers]
    numbers = sum(count * head_dim_of(own) for count, own in zip(heads, layers, strict=True))
    return int(2 * numbers * getattr(torch, dtype).itemsize)
