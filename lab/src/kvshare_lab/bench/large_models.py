"""
Models with random weights that are too large to be built in host memory: each layer's weights are made on the
GPU, where there is one, written to a file of their own, and dropped before the next layer's are made.

Answers depend on the whole prompt, as the weights are large enough for attention to be far from uniform.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_INDEX = "model.safetensors.index.json"
_STD = 1.28  # of a weight, over the square root of the width: .02 at 4,096, .08 at 256
_EMBEDDING_STD = 1.0


def write_by_layer(config: PreTrainedConfig, folder: Path, *, dtype: str, seed: int = 0) -> None:
    """Write the configuration and the weights, which are the same for the same seed and kind of device."""
    folder.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed)
    files: dict[str, str] = {}
    for number, shapes in enumerate(_by_layer(config)):
        file = f"model-{number:05}.safetensors"
        weights = {
            name: _weight(name, shape, config, getattr(torch, dtype), generator)
            for name, shape in shapes.items()
        }
        save_file(weights, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(weights, file)
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": files}), encoding="utf-8")
    config.dtype = dtype
    config.save_pretrained(folder)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # vLLMs are started next to this process


def _by_layer(config: PreTrainedConfig) -> list[Mapping[str, torch.Size]]:
    """Names and shapes of the weights: those outside of the layers, then layer by layer."""
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # no types
    config.architectures = [type(network).__name__]
    groups: defaultdict[int, dict[str, torch.Size]] = defaultdict(dict)
    for name, tensor in network.state_dict().items():
        found = _LAYER.match(name)
        groups[int(found[1]) if found else -1][name] = tensor.shape
    return [groups[number] for number in sorted(groups)]


def _weight(
    name: str, shape: torch.Size, config: PreTrainedConfig, dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """On the host, of this data type."""
    if "norm" in name:
        return torch.ones(shape, dtype=dtype)
    std = _EMBEDDING_STD if "embed_tokens" in name else _STD / config.hidden_size**0.5
    made = torch.randn(shape, dtype=dtype, device=generator.device, generator=generator)
    return made.mul_(std).cpu()
