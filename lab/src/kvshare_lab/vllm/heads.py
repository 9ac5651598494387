"""
Heads that draft from a Llama's hidden states, as checkpoints for vLLM: EAGLE3's with random weights, and one
of EAGLE whose drafts are accepted without any training.

That one is the head of a model whose first layer alone predicts, and whose embeddings have a root mean square
of 1, so that the norm before its attention changes nothing: the head has none. It computes the layer itself,
over the token that follows, one position to the left. So it sees all but the first token. A little of the
hidden state is added, so that a wrong one is seen in the head's rows, and hardly in what it drafts. The model
has a second layer, which adds nothing to what the first one gives: so there is KV that depends on attention,
as the connector's self-test demands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig

_STD = 0.12  # so large that attention is far from uniform
_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rope_parameters",
    "rms_norm_eps",
    "max_position_embeddings",
)
_LAYER = "model.layers.0."
_IDLE_LAYER = "model.layers.1."
OF_HIDDEN_STATE = 0.005
_ADDED = ("o_proj.weight", "down_proj.weight")  # what a layer adds comes through these
_EMBEDDING = "model.embed_tokens.weight"


def write_random_head(target: Path, folder: Path, *, seed: int = 3) -> Path:
    """Write one of EAGLE3, which embeds words as the target does."""
    config = _config(target)
    generator = torch.Generator().manual_seed(seed)
    shapes = _eagle3_shapes(config)
    weights = {name: torch.randn(shape, generator=generator) * _STD for name, shape in shapes.items()}
    weights |= {name: torch.ones_like(rows) for name, rows in weights.items() if "norm" in name}
    return _write(weights, config, folder)


def write_fitting_pair(target: Path, model: Path, head: Path) -> None:
    """Write the first two layers of a Llama as the model above, and its head."""
    weights, config = fitting_weights(target), _config(target)
    model.mkdir(parents=True, exist_ok=True)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    AutoConfig.from_pretrained(target, num_hidden_layers=2).save_pretrained(model)
    layer = {name.removeprefix("model."): rows for name, rows in weights.items() if name.startswith(_LAYER)}
    del layer["layers.0.input_layernorm.weight"]
    width = config.hidden_size
    mixed = torch.randn(width, width, generator=torch.Generator().manual_seed(3)) / width**0.5
    layer["fc.weight"] = torch.cat([torch.eye(width), OF_HIDDEN_STATE * mixed], dim=1)
    _write(layer, config, head)


def fitting_weights(target: Path) -> dict[str, torch.Tensor]:
    """The weights of that model, of the first two layers of a Llama."""
    weights, layers = load_file(target / "model.safetensors"), (_LAYER, _IDLE_LAYER)
    weights = {n: rows for n, rows in weights.items() if n.startswith(layers) or ".layers." not in n}
    for name, rows in weights.items():
        if name.startswith(_IDLE_LAYER) and name.endswith(_ADDED):
            rows.zero_()
    rows = weights[_EMBEDDING]
    weights[_EMBEDDING] = rows / rows.square().mean(dim=1, keepdim=True).sqrt()
    return weights


def write_head(weights: Mapping[str, torch.Tensor], target: Path, folder: Path) -> Path:
    """Write a head of EAGLE's kind with these weights, named as in a checkpoint."""
    return _write(weights, _config(target), folder)


def write_eagle3_head(
    weights: Mapping[str, torch.Tensor], words: torch.Tensor, target: Path, folder: Path
) -> Path:
    """Write a head of EAGLE3's kind, which drafts some words only. `words`: their numbers (W,), ascending."""
    config = _config(target)
    config.draft_vocab_size = len(words)
    steps = words - torch.arange(len(words))  # from a word's number among them to its number
    return _write({**weights, "d2t": steps}, config, folder)


def _config(target: Path) -> LlamaConfig:
    given = AutoConfig.from_pretrained(target)
    fields = {name: getattr(given, name) for name in _FIELDS}
    return LlamaConfig(**fields, num_hidden_layers=1, architectures=["LlamaForCausalLM"])


def _write(weights: Mapping[str, torch.Tensor], config: LlamaConfig, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: rows.contiguous() for name, rows in weights.items()}
    save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    return folder


def _eagle3_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Of three layers' hidden states; its layer reads the word next to them."""
    width = config.hidden_size
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm")
    return {
        "fc.weight": (width, 3 * width),
        **{f"{name}.weight": (width,) for name in norms},
        **_layer_shapes(config),
        "lm_head.weight": (config.vocab_size, width),
    }


def _layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    width, inner = config.hidden_size, config.intermediate_size
    dim, heads = int(config.head_dim or 0), int(config.num_key_value_heads or 0)
    queries, keys = int(config.num_attention_heads or 0) * dim, heads * dim
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (queries, 2 * width),
        "self_attn.k_proj": (keys, 2 * width),
        "self_attn.v_proj": (keys, 2 * width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "post_attention_layernorm": (width,),
    }
    return {f"midlayer.{name}.weight": shape for name, shape in shapes.items()}
