"""What was proved of a model when it was loaded, layer by layer, as a document."""

from __future__ import annotations

from typing import Any

from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.engines.embedded.unshared import UnsharedModel
from kvshare.kv.form import Form
from kvshare.kv.layout import Plane
from kvshare.kv.movement import Proof


def verified(model: EmbeddedModel | UnsharedModel) -> dict[str, Any]:
    """
    JSON-ready. `shares`: "everything", "same positions" or "nothing", and `why`.

    Errors are roots of mean squares in units of the rows; `control` says how many times further off what must
    not fit was.
    """
    layout = model.layout
    common = {
        "model": model.name,
        "max_model_len": model.max_model_len,
        "dtype": str(layout.dtype).removeprefix("torch."),
        "why": model.refusal or None,
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
                    _rows(layout.planes[layout.places[name, layer][0]], proof)
                    for name, proof in zip(("k", "v"), proofs, strict=True)
                ],
            }
            for layer, proofs in enumerate(model.proofs)
        ],
    }


def _sees(form: Form) -> str:
    parts = [str(form.reach)]
    if form.softcap is not None:
        parts.append(f"scores capped at {form.softcap:g}")
    if form.sinks is not None:
        parts.append("a sink a head")
    return ", ".join(parts)


def _rows(plane: Plane, proof: Proof) -> dict[str, Any]:
    return {
        "name": plane.name,
        "heads": plane.num_heads,
        "dim": plane.dim,
        "moves": None if proof.movement is None else str(proof.movement),
        "why": proof.reason or None,
        "error": proof.error,
        "control": proof.control,
    }
