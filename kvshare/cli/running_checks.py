"""
`kvshare doctor` on a running server of ours: from which length on sharing pays, at which loads less is shared
and why, and which parts are not well.

All is as the server itself measured it: it depends on the machine under the load that it has.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from kvshare.cli.check import Check, Checked
from kvshare.cli.checks import first_line
from kvshare.cli.client import AdminClient
from kvshare.cli.costs import disk_break_even, in_words
from kvshare.errors import KVShareError, UnreachableError

_TIMEOUT_S = 3.0
_GIVE_URL = "start `kvshare serve`, send it some prompts, and give its address with --url"


def check_costs(url: str, key: str | None) -> list[Check]:
    """Check what prefills and loads take there, and from how many tokens on a plan pays."""
    try:
        costs = AdminClient(url, key=key, timeout_s=_TIMEOUT_S).stats().get("costs")
        said = in_words(costs)
    except UnreachableError as exc:
        return [_unknown(f"none answers at {url} ({exc.problem})")]
    except KVShareError as exc:
        return [_unknown(first_line(exc))]
    if said is None:
        return [_unknown(f"{url} does not say; is that a KVShare server of this version?")]
    rates = f"{said.rates}; {said.origin}, by {url}"
    if said.missing:
        assumed = "what is assumed is measured by the requests that it serves"
        unmeasured = Checked.BREAK_EVEN.ok(
            f"unknown: {url} has not measured {' and '.join(said.missing)} yet",
            "it learns from the requests that it serves; ask again after some of more than 256 tokens, of "
            "which some were shared",
        )
        return [Checked.COSTS.ok(rates, assumed), unmeasured]
    if said.ever_pays:
        pays = Checked.BREAK_EVEN.ok(
            f"{said.break_even} that computes a tenth of its prompt, by what {url} has measured"
        )
    else:
        pays = Checked.BREAK_EVEN.warn(
            f"{said.break_even}, by what {url} has measured",
            "computing is as fast as loading here; requests are served unshared",
        )
    return [Checked.COSTS.ok(rates), pays, *_check_disk_rate(costs, url)]


def _unknown(problem: str) -> Check:
    return Checked.BREAK_EVEN.ok(f"unknown, as it is measured by a running server: {problem}", _GIVE_URL)


def _check_disk_rate(costs: object, url: str) -> list[Check]:
    """Check whether KV on disk pays, by what was measured; nothing for a server without a disk tier."""
    try:
        num_tokens = disk_break_even(costs)
    except (AttributeError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return []
    source = f"by what {url} has measured"
    if num_tokens is None:
        slow = f"KV on disk is read more slowly than it is computed, {source}; nothing is read from it"
        return [Checked.DISK.warn(slow, "set store.path to a faster disk, or store.disk_bytes to 0")]
    fast = f"KV on disk is read faster than it is computed from {num_tokens:,} tokens on, {source}"
    return [Checked.DISK.ok(fast)]


def check_control(url: str, key: str | None) -> Check:
    """Check whether sharing pays there, as the server itself compares it. Nothing is measured here."""
    try:
        control = AdminClient(url, key=key, timeout_s=_TIMEOUT_S).stats()["control"]
        share, loads = control["unshared_share"], control["loads"]
        reduced = [_reduced(load) for load in loads if load["rung"]]
        loads_said = [_known(load) for load in loads if not load["rung"] and load["slower"] is not None]
    except (KVShareError, KeyError, TypeError):  # `check_costs` says why it does not answer
        return Checked.CONTROLLER.ok(
            f"unknown: only a running server compares, and {url} does not say", _GIVE_URL
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
    said = "; ".join(loads_said) or "too little yet to say more"
    return Checked.CONTROLLER.ok(
        f"all loads share everything; {share:.0%} of the time is served without, to compare: {said}"
    )


def _reduced(load: Mapping[str, Any]) -> str:
    return f"with {load['load']} requests in flight {load['shared']}"


def _known(load: Mapping[str, Any]) -> str:
    word = "slower" if load["slower"] > 0 else "faster"
    return f"requests are {abs(load['slower']):.0%} {word} with it where {load['load']} are in flight"


def check_parts(url: str, key: str | None) -> list[Check]:
    """Check the parts that the server lists; none if it does not answer, which another check says."""
    try:
        document = AdminClient(url, key=key, timeout_s=_TIMEOUT_S).status()
        listed = document["parts"]
        well = Checked.PART.ok(f"all {len(listed)} parts of {url} are well")
        return [_part(part) for part in listed if part["state"] != "ok"] or [well]
    except (KVShareError, KeyError, TypeError):
        return []


def _part(part: Mapping[str, Any]) -> Check:
    label = " ".join(filter(None, [part["part"], part.get("name")]))
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(part["since"]))
    is_off = " is off" if part["state"] == "off" else ","
    return Checked.PART.warn(f"{label}{is_off} since {since}: {part['detail']}", part["remedy"])
