"""
Tiny models with random weights of the kinds that vLLM serves: dense, experts, windows, media, states.

Their configurations are in kinds.yaml. What vLLM and the connector do with each is in docs/models.md.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
)

from kvshare_lab.bench.random_models import DEMO_VOCAB_SIZE, copy_tokenizer
from kvshare_lab.vllm.int8_weights import quantise
from kvshare_lab.vllm.processors import tokenizer_with_images, write_processor

_CONFIGURATIONS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_TINY: Mapping[str, Any] = _CONFIGURATIONS["tiny"]
TEXT: Mapping[str, Mapping[str, Any]] = _CONFIGURATIONS["text"]
MULTIMODAL: Mapping[str, Mapping[str, Any]] = _CONFIGURATIONS["multimodal"]
# Of bench/random_models.yaml: vLLM's CPU kernels take latents of real sizes only, and read the experts of the
# others in another form than transformers writes.
NOT_HERE = ("deepseek-v2", "deepseek-v3", "llama4", "minimax-m2")
SERVED = frozenset(name for name in TEXT if not name.startswith("gemma4"))  # those have layers of one shape
_SERVED_LENGTH = 8192  # tokens
TEXT_TOKENS = 290  # ids below are text in each of them
WITH_IMAGES = ("llava",)  # with a processor, which needs no torchvision


def config_of(name: str, *, vocab_size: int | None = None) -> PreTrainedConfig:
    """
    The configuration of a kind of TEXT or MULTIMODAL. `vocab_size`: another one, of a kind of TEXT that is
    served, which then has a longer context, too.
    """
    merged = {**_TINY, **TEXT[name]} if name in TEXT else MULTIMODAL[name]
    fields = {key: value for key, value in merged.items() if value != "absent" and key != "weights"}
    if vocab_size is not None:
        fields |= {key: vocab_size for key in fields if key.startswith("vocab_size")}
        fields |= {key: _SERVED_LENGTH for key in fields if key in ("max_position_embeddings", "n_positions")}
    config: PreTrainedConfig = AutoConfig.for_model(**fields)
    return config


def write_served_kind(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write one of SERVED for a server: with the demo model's tokenizer, and as many tokens as that has."""
    write_kind(name, folder, seed=seed, vocab_size=DEMO_VOCAB_SIZE)
    copy_tokenizer(folder)
    return folder


def write_kind(name: str, folder: Path, *, seed: int = 0, vocab_size: int | None = None) -> Path:
    """Write a kind's model, with a tokenizer if it takes media: vLLM asks for one. Returns the folder."""
    auto = AutoModelForCausalLM if name in TEXT else AutoModelForImageTextToText
    torch.manual_seed(seed)
    model = auto.from_config(config_of(name, vocab_size=vocab_size))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(0.0, 0.12)
    model.save_pretrained(folder)
    if TEXT.get(name, {}).get("weights") == "int8":
        quantise(folder)
    if name in MULTIMODAL:
        tokenizer = tokenizer_with_images()
        tokenizer.save_pretrained(folder)
        if name in WITH_IMAGES:
            write_processor(folder, tokenizer)
    return folder
