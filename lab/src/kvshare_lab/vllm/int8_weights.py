"""
Writes a checkpoint's linear layers again in 8 bits, as compressed-tensors does (w8a8): a scale for each row
of weights, and one for each row of activations, which vLLM finds while it computes.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_LARGEST = 127
_ROWS = {"num_bits": 8, "type": "int", "symmetric": True}
_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_ROWS, "strategy": "channel", "dynamic": False},
            "input_activations": {**_ROWS, "strategy": "token", "dynamic": True},
        }
    },
}


def quantise(folder: Path) -> None:
    """A model of one file, whose linear layers are named `..._proj`."""
    path, document = folder / "model.safetensors", folder / "config.json"
    written: dict[str, torch.Tensor] = {}
    for name, weight in load_file(path).items():
        written[name] = weight
        if name.endswith("_proj.weight"):
            scale = weight.float().abs().amax(dim=1, keepdim=True) / _LARGEST
            written[name] = (weight / scale).round().to(torch.int8)
            written[f"{name}_scale"] = scale
    save_file(written, path, metadata={"format": "pt"})
    config = {**json.loads(document.read_text("utf-8")), "quantization_config": _CONFIG}
    document.write_text(json.dumps(config), encoding="utf-8")
