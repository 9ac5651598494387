"""A server's measured and assumed costs in words, for `kvshare stats` and `kvshare doctor`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from kvshare.admin import Costs

_KINDS = (
    "prefill",
    "pass",
    "load",
    "blocks",
    "disk",
    "lookup",
    "embedding",
)  # of kvshare/sharing/cost.py, which imports numpy
_NEEDED = ("load", "prefill")  # before these are measured, it is not known from where on sharing pays
_EXAMPLE = "8192"  # tokens


@dataclass(frozen=True, slots=True)
class SaidCosts:
    """Sentences without a full stop."""

    origin: str  # which rates were measured, and on what
    rates: str  # the times that they come to
    break_even: str  # from which length on sharing pays
    ever_pays: bool
    missing: tuple[str, ...]  # not measured, and needed to know from where on it pays


def in_words(costs: object) -> SaidCosts | None:
    """Put costs into words; None for what no server of this version sends."""
    try:
        return _said(costs)  # type: ignore[arg-type]  # if it is none, an error says so
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def disk_break_even(costs: object) -> int | None:
    """
    Return the number of tokens from which reading KV from disk is faster than computing it; None: never.

    Raises:  KeyError for a server without a disk tier, or of another version
    """
    from kvshare.sharing.cost import rates_of
    from kvshare.sharing.rates import DISK, MEMORY

    rates = rates_of(cast("Costs", costs))
    if DISK not in rates.loads:
        raise KeyError(DISK)
    for num_tokens in (1 << power for power in range(4, 21)):
        loaded_s = sum(rates.load_s(num_tokens, place=place) for place in (DISK, MEMORY))
        if loaded_s + num_tokens * rates.reused_s < rates.full_s(num_tokens):
            return num_tokens
    return None


def _said(costs: Mapping[str, Any]) -> SaidCosts:
    tokens, measured = costs["break_even_tokens"], costs["measured"]
    never = tokens is None
    return SaidCosts(
        origin=_origin(measured, costs["machine"], without={"blocks", "disk"} - costs["loads"].keys()),
        rates=_rates(costs),
        break_even="a plan never pays" if never else f"a plan pays from {tokens:,} tokens on",
        ever_pays=not never,
        missing=tuple(
            kind for kind in _NEEDED if kind not in measured and not (kind == "load" and "blocks" in measured)
        ),
    )


def _origin(measured: list[str], machine: str, *, without: Collection[str]) -> str:
    known = [kind for kind in _KINDS if kind in measured]
    assumed = [kind for kind in _KINDS if kind not in known and kind not in without]
    parts = {"measured": known, "assumed": assumed}
    said = "; ".join(f"{how}: {', '.join(kinds)}" for how, kinds in parts.items() if kinds)
    return f"{said} (on {machine})" if machine else said


def _rates(costs: Mapping[str, Any]) -> str:
    full = [f"{int(length):,} tokens {_ms(seconds)}" for length, seconds in costs["full_s"].items()]
    loads = [
        f"loads from {place} {load['bytes_per_s'] / 1e9:.1f} GB/s" for place, load in costs["loads"].items()
    ]
    others = [
        f"a pass {_ms(costs['pass_s'])}",
        f"the lookup of {int(_EXAMPLE):,} tokens {_ms(costs['lookup_s'][_EXAMPLE])}",
        f"their embedding {_ms(costs['embedding_s'][_EXAMPLE])}",
    ]
    return "a full prefill of " + ", ".join([*full, *loads, *others])


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return f"{milliseconds:,.0f} ms" if milliseconds >= 10 else f"{milliseconds:.1f} ms"
