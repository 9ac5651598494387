"""
Models with a layer that drafts (MTP), as checkpoints for vLLM: in the same folder as the model's own layers.

    norm of the following word's embedding ]  projection   a layer of the model's kind   the model's own words
    norm of the model's hidden state       ]

ERNIE's models are Llamas whose rotated pairs stand next to each other, and their MTP layer is a Llama's. So
any Llama can be written as one of them, with a layer that was trained or made for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, LlamaConfig
from transformers.models.ernie4_5_moe import Ernie4_5_MoeConfig
from transformers.models.gemma4_assistant import Gemma4AssistantConfig, Gemma4AssistantForCausalLM

from kvshare_lab.vllm.heads import OF_HIDDEN_STATE, fitting_weights

_WEIGHTS = "model.safetensors"
_STD = 0.12


@dataclass(frozen=True, slots=True)
class _Form:
    """How a kind of model names its MTP layer. `{n}`: the number of its own layers."""

    layer: str
    embedded_norm: str
    hidden_norm: str
    fc: str
    last_norm: str | None
    has_experts: bool  # in the MTP layer, as in the model's last one


_ERNIE = _Form(
    "model.mtp_block.0.",
    "model.mtp_emb_norm.0",
    "model.mtp_hidden_norm.0",
    "model.mtp_linear_proj.0",
    last_norm=None,
    has_experts=False,
)
_LIKE_DEEPSEEK = _Form(
    "model.layers.{n}.",
    "model.layers.{n}.enorm",
    "model.layers.{n}.hnorm",
    "model.layers.{n}.eh_proj",
    last_norm="model.layers.{n}.shared_head.norm",
    has_experts=True,
)
_FORMS = {
    "ernie4_5_moe": _ERNIE,
    "glm4_moe": _LIKE_DEEPSEEK,
}


def write_fitting_mtp(target: Path, folder: Path) -> Path:
    """Write a Llama's first two layers as the model of heads.py, whose MTP layer drafts what it says."""
    weights, config = fitting_weights(target), _llama(target)
    prefix = "model.layers.0."
    layer = {f"layers.0.{n.removeprefix(prefix)}": w for n, w in weights.items() if n.startswith(prefix)}
    width = config.hidden_size
    mixed = torch.randn(width, width, generator=torch.Generator().manual_seed(3)) / width**0.5
    layer["fc.weight"] = torch.cat([torch.eye(width), OF_HIDDEN_STATE * mixed], dim=1)
    layer |= {f"{name}.weight": torch.ones(width) for name in ("embedded_norm", "hidden_norm")}
    config.num_hidden_layers = 2
    return write_as_ernie(weights, config, layer, folder)


def write_as_ernie(
    weights: Mapping[str, torch.Tensor],
    config: LlamaConfig,
    layer: Mapping[str, torch.Tensor],
    folder: Path,
) -> Path:
    """
    Write a Llama in the form of ERNIE's models without experts, with an MTP layer.

    `layer`: named embedded_norm, hidden_norm, fc (the word first), and layers.0, a Llama's
    """
    own = {name: _paired(name, rows, config) for name, rows in weights.items()}
    own |= {_ernie_name(name): rows for name, rows in layer.items()}
    folder.mkdir(parents=True, exist_ok=True)
    whole = {name: rows.clone(memory_format=torch.contiguous_format) for name, rows in own.items()}
    save_file(whole, folder / _WEIGHTS, metadata={"format": "pt"})
    _as_ernie(config).save_pretrained(folder)
    return folder


def add_mtp_layer(folder: Path, *, seed: int = 5) -> Path:
    """
    Add an MTP layer to a checkpoint of one of _FORMS: one of the model's own layers, with noise.

    If vLLM draws the weights, there is nothing to add but the configuration's word for it.
    """
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}), encoding="utf-8")
    if not (folder / _WEIGHTS).exists():
        return folder
    form, count, width = _FORMS[config["model_type"]], config["num_hidden_layers"], config["hidden_size"]
    weights, generator = load_file(folder / _WEIGHTS), torch.Generator().manual_seed(seed)
    prefix = f"model.layers.{count - 1 if form.has_experts else 0}."
    added = {form.layer + n.removeprefix(prefix): w for n, w in weights.items() if n.startswith(prefix)}
    for name, rows in added.items():
        if rows.dim() > 1:
            added[name] = rows + torch.randn(rows.shape, generator=generator) * _STD
    norms = (form.embedded_norm, form.hidden_norm, form.last_norm)
    added |= {f"{name}.weight": torch.ones(width) for name in norms if name is not None}
    added[f"{form.fc}.weight"] = torch.randn(width, 2 * width, generator=generator) / width**0.5
    named = {name.format(n=count): rows.clone() for name, rows in added.items()}
    save_file({**weights, **named}, folder / _WEIGHTS, metadata={"format": "pt"})
    return folder


def _llama(target: Path) -> LlamaConfig:
    config: LlamaConfig = AutoConfig.from_pretrained(target)
    return config


def _as_ernie(config: LlamaConfig) -> Ernie4_5_MoeConfig:
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
        "max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
    )
    return Ernie4_5_MoeConfig(
        **{name: getattr(config, name) for name in same},
        moe_num_experts=0,
        moe_layer_start_index=config.num_hidden_layers,
        num_nextn_predict_layers=1,
        architectures=["Ernie4_5_MoeForCausalLM"],
    )


def _ernie_name(name: str) -> str:
    part, _, rest = name.rpartition(".")
    if part.startswith("layers.0."):
        return f"{_ERNIE.layer}{name.removeprefix('layers.0.')}"
    return f"{getattr(_ERNIE, part)}.{rest}"


def _paired(name: str, rows: torch.Tensor, config: LlamaConfig) -> torch.Tensor:
    """Queries and keys with both numbers of a rotated pair next to each other; all others as they are."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return rows
    dim, width = int(config.head_dim or 0), rows.shape[-1]
    return rows.view(-1, 2, dim // 2, width).transpose(1, 2).reshape(-1, width)


def write_assistant(target: Path, folder: Path, *, seed: int = 7) -> Path:
    """
    Write a random assistant for a Gemma 4 without media: layers that have no KV of their own.

    They attend to that of the target's last layers of their kinds.
    """
    own = AutoConfig.from_pretrained(target).to_dict()
    own.pop("per_layer_config", None)  # it follows from the kinds of layers
    changes = {
        "hidden_size": own["hidden_size"] // 2,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 0,
    }
    config = Gemma4AssistantConfig(text_config={**own, **changes}, backbone_hidden_size=own["hidden_size"])
    torch.manual_seed(seed)
    model = Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for name, rows in model.named_parameters():
            if "norm" not in name:
                rows.normal_(0.0, _STD)
    model.save_pretrained(folder)
    return folder
