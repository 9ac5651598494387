"""What loading a model verified of each layer, as a document."""

from __future__ import annotations

from typing import Any

from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.engines.embedded.unshared import UnsharedModel
from kvshare.kv.form import Form
from kvshare.kv.layout import Plane
from kvshare.kv.movement import Verification


def verification_document(model: EmbeddedModel | UnsharedModel) -> dict[str, Any]:
    """
    JSON-ready. `shares` is "everything", "same positions" or "nothing"; `why` is the reason.

    `error` is the relative error of the moved rows (root mean square), and `control` says how many times
    further off the nearest wrong movement is.
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


def _sees(form: Form) -> str:
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
