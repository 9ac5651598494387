"""Verifies a network before it is served, describes the result, and estimates the cost of context."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from delta_tree import Span
from kvshare.embedded.model import EmbeddedModel
from kvshare.embedded.unshared import UnsharedModel
from kvshare.errors import UnshareableError
from kvshare.kv.attention import PartialPass
from kvshare.kv.layout import AttentionForm, Plane
from kvshare.kv.movement import Verification


def served(
    network: PreTrainedModel, *, name: str, max_model_len: int | None = None
) -> EmbeddedModel | UnsharedModel:
    """Return a model with sharing if the network supports it, else without. ModelError if both fail."""
    attention = network.config._attn_implementation
    try:
        return EmbeddedModel(network, name=name, max_model_len=max_model_len)
    except UnshareableError as exc:
        network.set_attn_implementation(attention)
        return UnsharedModel(network, name=name, why=str(exc), max_model_len=max_model_len)


def verification_document(model: EmbeddedModel | UnsharedModel) -> dict[str, Any]:
    """
    Describe what can be shared, JSON-ready. `shares` is "everything", "same positions" or "nothing"; `why` is
    the reason if it is not everything.

    `error`: relative error of the moved rows (root mean square). `control`: by how many times that error the
    nearest wrong movement is off.
    """
    layout = model.layout
    common = {
        "model": model.name,
        "max_model_len": model.max_model_len,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "why": model.unsupported_reason or None,
    }
    if isinstance(model, UnsharedModel):
        return {**common, "shares": "nothing", "layers": []}
    return {
        **common,
        "planes": str(layout),
        "bytes_per_token": layout.bytes_per_token,
        "shares": "everything" if layout.can_move else "same positions",
        "repairs": "chosen or by place" if model.can_listen else "by place",
        "attention_error": model.attention_error,
        "layers": [
            {
                "layer": layer,
                "sees": _sees(model.forms[layer]),
                "rows": [
                    _rows(layout.planes[layout.places[name, layer][0]], verification)
                    for name, verification in zip(("k", "v"), verifications, strict=True)
                ],
            }
            for layer, verifications in enumerate(model.verifications)
        ],
    }


def _sees(form: AttentionForm) -> str:
    parts = [str(form.reach)]
    if form.softcap is not None:
        parts.append(f"scores capped at {form.softcap:g}")
    if form.sinks is not None:
        parts.append("a sink a head")
    return ", ".join(parts)


def _rows(plane: Plane, verification: Verification) -> dict[str, Any]:
    return {
        "name": plane.name,
        "heads": plane.num_heads,
        "dim": plane.dim,
        "moves": None if verification.movement is None else str(verification.movement),
        "why": verification.reason or None,
        "error": verification.error,
        "control": verification.control,
    }


def context_share(model: EmbeddedModel) -> float:
    """
    Return the cost of a token that is attended to, relative to a computed one, without attention itself.

    Latent attention stores a compressed row for each token, and every pass expands all of them into keys and
    values again. The result is the ratio of multiplications: those in modules that get all visible rows, as
    hooks show, over those for one computed token. It is 0 for a model that stores keys and values as it uses
    them.
    """
    tokens = model.probe_tokens()
    last = Span(len(tokens) - 1, len(tokens))
    num_rows: dict[torch.nn.Linear, int] = {}

    def count(module: torch.nn.Linear, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
        num_rows[module] = inputs[0].shape[:-1].numel()

    linear = [module for module in model.network.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [module.register_forward_hook(count) for module in linear]
    try:
        model.compute(PartialPass(model.new_sequence(len(tokens)), (last,)), tokens[last.start :])
    finally:
        for hook in hooks:
            hook.remove()
    expanding = (module for module, rows in num_rows.items() if rows == len(tokens) > 1)
    of_context = sum(int(module.weight.numel()) for module in expanding)
    return of_context / max(1, _active_parameters(model.network) - of_context)


def _active_parameters(network: torch.nn.Module) -> int:
    """Return how many weights are used for one token; of experts, only those to which it is routed."""
    config: Any = network.config
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    num_experts = next((n for name in names if (n := getattr(config, name, None))), 1)
    used = (getattr(config, "num_experts_per_tok", None) or num_experts) / num_experts
    return round(
        sum(
            weights.numel() * (used if ".experts." in name else 1)
            for name, weights in network.named_parameters()
            if weights.ndim > 1 and "embed" not in name
        )
    )
