"""`kvshare doctor` on what a running server has measured: from which length on sharing pays."""

from __future__ import annotations

from kvshare.cli.check import Check, Checked
from kvshare.cli.checks import first_line
from kvshare.cli.client import AdminClient
from kvshare.cli.costs import disk_break_even, in_words
from kvshare.errors import KVShareError, UnreachableError

_TIMEOUT_S = 3.0


def check_costs(url: str, key: str | None) -> list[Check]:
    """
    What prefills and loads take, and from how many tokens on a plan pays, by what this server has measured.

    Nothing is measured here: it depends on the machine under the load that it has.
    """
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
    return Checked.BREAK_EVEN.ok(
        f"unknown, as it is measured by a running server: {problem}",
        "start `kvshare serve`, send it some prompts, and give its address with --url",
    )


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
