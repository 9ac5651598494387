"""`kvshare doctor` on the controller of a running server: at which loads less is shared, and why."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvshare.cli.check import Check, Checked
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
        return Checked.CONTROLLER.ok(
            f"unknown: only a running server compares, and {url} does not say",
            "start `kvshare serve`, send it some prompts, and give its address with --url",
        )
    if not share:
        return Checked.CONTROLLER.ok(
            "control.unshared_share is 0: whether sharing pays is not compared, and it is never reduced"
        )
    if reduced:
        return Checked.CONTROLLER.warn(
            f"less is shared where it made requests slower: {'; '.join(reduced)}",
            "nothing is broken, and it returns when it pays again; `kvshare stats` shows the figures. "
            "Longer or more similar prompts save more; docs/operating.md says what makes sharing slow",
        )
    said = "; ".join(known) or "too little yet to say more"
    return Checked.CONTROLLER.ok(
        f"all loads share everything; {share:.0%} of the time is served without, to compare: {said}"
    )


def _reduced(load: Mapping[str, Any]) -> str:
    return f"with {load['load']} requests in flight {load['shared']}"


def _known(load: Mapping[str, Any]) -> str:
    word = "slower" if load["slower"] > 0 else "faster"
    return f"requests are {abs(load['slower']):.0%} {word} with it where {load['load']} are in flight"
