"""
Exports the demo model with wider heads, which compute the same function, for engines without a kernel for its
head dimension of 48, such as vLLM's CPU backend.

    python -m kvshare_lab.demo_model.export FOLDER

New dimensions are zero. Rotary pair i of D dimensions rotates by base^(-2i/D) per position, so with D'
dimensions the base must be base^(D'/D). Scores are divided by sqrt(D') instead of sqrt(D), so the queries are
multiplied by sqrt(D'/D).
"""

import shutil
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from kvshare.demo import MODEL_PATH

HEAD_DIM = 64


def export(folder: Path, *, head_dim: int = HEAD_DIM) -> Path:
    """Write model, tokenizer and template into `folder`, which is made if needed. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copyfile(MODEL_PATH / name, folder / name)
    widened(LlamaForCausalLM.from_pretrained(MODEL_PATH), head_dim).save_pretrained(folder)
    return folder


def widened(model: LlamaForCausalLM, head_dim: int) -> LlamaForCausalLM:
    """The same function with heads of `head_dim` dimensions. Raises ValueError if too few or odd."""
    document: dict[str, Any] = model.config.to_dict()
    old: int = document["head_dim"]
    if head_dim < old or head_dim % 2:
        raise ValueError(f"head_dim: expected an even number of at least {old}, got {head_dim}")
    rope = document["rope_parameters"]
    base = rope["rope_theta"] ** (head_dim / old)
    config = LlamaConfig(
        **{**document, "head_dim": head_dim, "rope_parameters": {**rope, "rope_theta": base}}
    )
    wide = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]  # transformers has no types here
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = _pad_pairs(weight, old, head_dim) * (head_dim / old) ** 0.5
        elif name.endswith("k_proj.weight"):
            weights[name] = _pad_pairs(weight, old, head_dim)
        elif name.endswith("v_proj.weight"):
            weights[name] = _pad(weight, old, head_dim)
        elif name.endswith("o_proj.weight"):
            weights[name] = _pad(weight.T, old, head_dim).T.contiguous()
    wide.load_state_dict(weights)
    wide.train(False)
    return wide


def _pad(weight: torch.Tensor, head_dim: int, wider: int) -> torch.Tensor:
    """(H * head_dim, X) -> (H * wider, X), with zeros at the end of each head."""
    heads = weight.reshape(-1, head_dim, weight.shape[1])
    return torch.nn.functional.pad(heads, (0, 0, 0, wider - head_dim)).flatten(0, 1)


def _pad_pairs(weight: torch.Tensor, head_dim: int, wider: int) -> torch.Tensor:
    return _pad(weight, head_dim // 2, wider // 2)


def main(folder: Path, head_dim: int = HEAD_DIM) -> None:
    """Write the demo model with wider heads, for vLLM on CPU."""
    typer.echo(export(folder, head_dim=head_dim))


if __name__ == "__main__":
    typer.run(main)
