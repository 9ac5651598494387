"""
Writes some layers of a model as a smaller model, a second one for the fidelity lab (docs/fidelity.md).

    .venv/bin/python lab/scripts/cut_model.py FOLDER_OF_SMOLLM2 0-17,24-29 smollm2-24

SmolLM2 still writes sentences without layers 18 to 23. With only its first 20 or 26 layers it does not.
"""

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(
    model: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="A folder.")],
    layers: Annotated[str, typer.Argument(help="Such as 0-17,24-29.")],
    out: Path,
) -> None:
    """Write these layers of MODEL to the folder OUT, with its tokenizer."""
    network = AutoModelForCausalLM.from_pretrained(model)
    chosen = [number for part in layers.split(",") for number in _numbers(part)]
    if max(chosen) >= len(network.model.layers):
        raise typer.BadParameter(f"{model} has {len(network.model.layers)} layers", param_hint="LAYERS")
    network.model.layers = torch.nn.ModuleList(network.model.layers[number] for number in chosen)
    network.config.num_hidden_layers = len(chosen)
    if kinds := getattr(network.config, "layer_types", None):
        network.config.layer_types = [kinds[number] for number in chosen]
    network.save_pretrained(out)
    AutoTokenizer.from_pretrained(model).save_pretrained(out)


def _numbers(part: str) -> range:
    first, _, last = part.partition("-")
    try:
        return range(int(first), int(last or first) + 1)
    except ValueError as exc:
        raise typer.BadParameter(f"{part!r} is no range of layers", param_hint="LAYERS") from exc


if __name__ == "__main__":
    typer.run(main)
