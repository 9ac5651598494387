"""`kvshare doctor` on the controller of a running server: at which loads less is shared, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshare.cli.checks import Check, found
from kvshare.cli.client import AdminClient
from kvshare.errors import KVShareError

_TIMEOUT_S = 3.0


def check_control(url: str, key: str | None) -> Check:
    """Check whether sharing pays there, as the server itself compares it. Nothing is measured here."""
    try:
        control = AdminClient(url, key=key, timeout_s=_TIMEOUT_S).stats()["control"]
        share, loads = control["unshared_share"], control["loads"]
        reduced = [_reduced(load) for load in loads if load["rung"]]
        known = [_known(load) for load in loads if not load["rung"] and load["slower"] is not None]
    except (KVShareError, KeyError, TypeError):  # `break-even` says why it does not answer
        return found("controller.unknown", url=url)
    if not share:
        return found("controller.off")
    if reduced:
        return found("controller.reduced", reduced="; ".join(reduced))
    if not known:
        return found("controller.early", share=share)
    return found("controller.full", share=share, known="; ".join(known))


def _reduced(load: Mapping[str, Any]) -> str:
    return f"with {load['load']} requests in flight {load['shared']}"


def _known(load: Mapping[str, Any]) -> str:
    word = "slower" if load["slower"] > 0 else "faster"
    return f"requests are {abs(load['slower']):.0%} {word} with it where {load['load']} are in flight"
