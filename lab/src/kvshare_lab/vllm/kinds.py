"""
Tiny models with random weights of the kinds that vLLM serves: dense, experts, windows, media, states.

Their configurations are in kinds.yaml. What vLLM and the connector do with each is in docs/models.md.
"""

from collections.abc import Mapping
from functools import partial
from itertools import cycle, islice
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
from kvshare_lab.vllm.drawn_weights import write_configuration
from kvshare_lab.vllm.int8_weights import quantise
from kvshare_lab.vllm.processors import tokenizer_with_images, write_processor

_CONFIGURATIONS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_TINY: Mapping[str, Any] = _CONFIGURATIONS["tiny"]
TEXT: Mapping[str, Mapping[str, Any]] = _CONFIGURATIONS["text"]
MULTIMODAL: Mapping[str, Mapping[str, Any]] = _CONFIGURATIONS["multimodal"]
# Of bench/random_configurations.py: vLLM's CPU kernels take latents of real sizes only, and read the experts
# of the others in another form than transformers writes.
NOT_HERE = ("deepseek-v2", "deepseek-v3", "llama4", "minimax-m2")
TEXT_TOKENS = 290  # ids below are text in each of them
WITH_IMAGES = ("llava",)  # with a processor, which needs no torchvision
DRAWN = frozenset(name for name, own in {**TEXT, **MULTIMODAL}.items() if own.get("weights") == "drawn")
_TIMED = "-timing"  # the end of the name of a kind that is as large as the "timing" Llama
# Of WITH_IMAGES, served with its tower and its own tokenizer; other kinds that take media are served without.
ILLUSTRATED = "llava-images"
MAX_IMAGES = 3
SERVED = frozenset(
    {*TEXT, *MULTIMODAL, *(f"{name}{_TIMED}" for name in _CONFIGURATIONS["timed"]["kinds"]), ILLUSTRATED}
    - DRAWN
)
_SERVED_LENGTH = 8192  # tokens
_MARKS = 16  # ids for places of media, after those of the demo model's tokenizer: no prompt has them
_TIMED_SIZE: Mapping[str, Any] = _CONFIGURATIONS["timed"]["size"]
_OUR_KEYS = ("weights", "architecture", "unknown")  # not transformers'

Fields = dict[str, Any]


def config_of(name: str) -> PreTrainedConfig:
    """The configuration of a kind of TEXT or MULTIMODAL."""
    config: PreTrainedConfig = AutoConfig.for_model(**_given(_fields(name)))
    return config


def served_config(name: str) -> PreTrainedConfig:
    """
    The configuration of one of SERVED: with a longer context, and as many tokens as the demo model's
    tokenizer has. A kind that takes media has a few more, which mark their places.
    """
    if name == ILLUSTRATED:
        llava = config_of("llava")
        llava.get_text_config().max_position_embeddings = _SERVED_LENGTH
        return llava
    kind = name.removesuffix(_TIMED)
    change = partial(_served, is_timed=name != kind, marks=_MARKS * (kind in MULTIMODAL))
    whole = _fields(kind)
    if kind in MULTIMODAL:
        marks = {key: value - TEXT_TOKENS + DEMO_VOCAB_SIZE for key, value in whole.items() if _is_mark(key)}
        whole |= {**marks, "text_config": _given(change(whole["text_config"]))}
    else:
        whole = change(whole)
    config: PreTrainedConfig = AutoConfig.for_model(**_given(whole))
    return config


def max_images(name: str) -> int | None:
    """Return the most images of a prompt; 0: a server takes text only. None: the model takes no media."""
    if name == ILLUSTRATED:
        return MAX_IMAGES
    return 0 if name.removesuffix(_TIMED) in MULTIMODAL else None


def _fields(name: str) -> Fields:
    return {**_TINY, **TEXT[name]} if name in TEXT else dict(MULTIMODAL[name])


def _given(fields: Mapping[str, Any]) -> Fields:
    return {key: value for key, value in fields.items() if value != "absent" and key not in _OUR_KEYS}


def _is_mark(key: str) -> bool:
    return key.endswith(("_token_id", "_token_index")) and key[:3] not in ("pad", "bos", "eos")


def _served(own: Mapping[str, Any], *, is_timed: bool, marks: int) -> Fields:
    """Fields of a language model, of another size."""
    changed: Fields = {key: DEMO_VOCAB_SIZE + marks for key in own if key.startswith("vocab_size")}
    changed |= {key: _SERVED_LENGTH for key in own if key in ("max_position_embeddings", "n_positions")}
    if is_timed:
        changed |= {key: value for key, value in _TIMED_SIZE.items() if own.get(key) not in (None, "absent")}
        if isinstance(kinds := own.get("layer_types"), list):
            count = _TIMED_SIZE["num_hidden_layers"]
            changed["layer_types"] = list(islice(cycle(kinds), count))
    return {**own, **changed}


def write_served_kind(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write one of SERVED for a server: with the demo model's tokenizer, and the tokens that this has."""
    if name == ILLUSTRATED:
        _save(_random("llava", served_config(name), seed), "llava", folder)
        _write_tokenizer("llava", folder)
        return folder
    kind = name.removesuffix(_TIMED)
    model = _random(kind, served_config(name), seed)
    if kind in MULTIMODAL:  # no answer has a mark
        with torch.no_grad():
            for embedding in (model.get_output_embeddings(), model.get_input_embeddings()):
                embedding.weight[DEMO_VOCAB_SIZE:] = 0
    _save(model, kind, folder)
    copy_tokenizer(folder)
    return folder


def write_kind(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a kind's model, with a tokenizer if it takes media: vLLM asks for one. Returns the folder."""
    if name in DRAWN:
        fields = _fields(name)
        own = {**_given(fields), "architectures": [fields["architecture"]]}
        write_configuration(folder, own, is_known=not fields.get("unknown"))
    else:
        _save(_random(name, config_of(name), seed), name, folder)
    if name in MULTIMODAL:
        _write_tokenizer(name, folder)
    return folder


def _write_tokenizer(kind: str, folder: Path) -> None:
    """With a processor, if there is one."""
    tokenizer = tokenizer_with_images()
    tokenizer.save_pretrained(folder)
    if kind in WITH_IMAGES:
        write_processor(folder, tokenizer)


def _random(kind: str, config: PreTrainedConfig, seed: int) -> Any:
    """A kind's model with random weights."""
    auto = AutoModelForCausalLM if kind in TEXT else AutoModelForImageTextToText
    torch.manual_seed(seed)
    model = auto.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" not in parameter_name:
                parameter.normal_(0.0, 0.12)
    return model


def _save(model: Any, kind: str, folder: Path) -> None:
    model.save_pretrained(folder)
    if TEXT.get(kind, {}).get("weights") == "int8":
        quantise(folder)
