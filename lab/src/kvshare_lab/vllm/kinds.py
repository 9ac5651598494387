"""
Tiny models with random weights of the kinds that vLLM serves: dense, experts, windows, media, states.

Their configurations are in kinds.yaml. What vLLM and the connector do with each is in docs/models.md.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer, models
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

from kvshare_lab.vllm.int8_weights import quantise

_CONFIGURATIONS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_TINY: Mapping[str, Any] = _CONFIGURATIONS["tiny"]
TEXT: Mapping[str, Mapping[str, Any]] = _CONFIGURATIONS["text"]
MULTIMODAL: Mapping[str, Mapping[str, Any]] = _CONFIGURATIONS["multimodal"]
# Of bench/random_models.yaml: vLLM's CPU kernels take latents of real sizes only, and read the experts of the
# others in another form than transformers writes.
NOT_HERE = ("deepseek-v2", "deepseek-v3", "llama4", "minimax-m2")
TEXT_TOKENS = 290  # ids below are text in each of them


def config_of(name: str) -> PreTrainedConfig:
    """The configuration of a kind of TEXT or MULTIMODAL."""
    merged = {**_TINY, **TEXT[name]} if name in TEXT else MULTIMODAL[name]
    fields = {key: value for key, value in merged.items() if value != "absent" and key != "weights"}
    config: PreTrainedConfig = AutoConfig.for_model(**fields)
    return config


def write_kind(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a kind's model, with a tokenizer if it takes media: vLLM asks for one. Returns the folder."""
    auto = AutoModelForCausalLM if name in TEXT else AutoModelForImageTextToText
    torch.manual_seed(seed)
    model = auto.from_config(config_of(name))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(0.0, 0.12)
    model.save_pretrained(folder)
    if TEXT.get(name, {}).get("weights") == "int8":
        quantise(folder)
    if name in MULTIMODAL:
        words = models.WordLevel({f"w{index}": index for index in range(_TINY["vocab_size"])}, unk_token="w3")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w3", eos_token="w2")  # type: ignore[no-untyped-call]
        tokenizer.save_pretrained(folder)
    return folder
