"""The options of `kvshare replay` that describe stores: --capacity, --tier, --eviction."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from kvshare.cli.connector_options import parse_bytes

if TYPE_CHECKING:
    from kvshare.replay.tiers import Size, TierSizes

_FLAG = "--tier"
_PLACES = ("host", "disk")


def parse_capacities(texts: list[str], bytes_per_token: int) -> tuple[int, ...]:
    """Tokens, ascending, each once; "none" alone is none."""
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    return () if words == ["none"] else tuple(sorted({_tokens(word, bytes_per_token) for word in words}))


def _tokens(word: str, bytes_per_token: int) -> int:
    """Parse "500k" tokens, or "4GB" or "4GiB" bytes."""
    is_bytes = word.lower().endswith("b")
    try:
        amount = parse_bytes(word if is_bytes else f"{word}b")
    except typer.BadParameter as exc:
        message = f"expected tokens like 500k, bytes like 4GiB or none, got {word!r}"
        raise typer.BadParameter(message, param_hint="--capacity") from exc
    tokens = amount // bytes_per_token if is_bytes else amount
    if tokens < 1:
        raise typer.BadParameter(f"{word} has no room for a token", param_hint="--capacity")
    return tokens


def parse_tiers(texts: Sequence[str]) -> TierSizes:
    """Memory, and a disk if one is named. Raises a usage error that says what is expected, or ConfigError."""
    from kvshare.replay.tiers import TierSizes

    sizes: dict[str, Size] = {}
    for text in (part.strip() for each in texts for part in each.split(",")):
        place, colon, size = text.partition(":")
        if place not in _PLACES or not colon:
            raise _wrong(f"expected host:SIZE or disk:SIZE, such as host:64GiB, got {text!r}")
        if place in sizes:
            raise _wrong(f"{place} is given twice")
        sizes[place] = _size(size.strip(), text)
    if "host" not in sizes:
        raise _wrong("expected host:SIZE, too: a disk lies below memory")
    tiers = TierSizes(sizes["host"], sizes.get("disk"))
    if tiers.disk is not None and (tiers.host.num_bytes is None) == (tiers.disk.num_bytes is None):
        tiers.of(2**40)  # raises now what it would raise once the log is read
    return tiers


def _size(text: str, whole: str) -> Size:
    from kvshare.replay.tiers import Size

    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        size = Size(text, share=float(match[1]) / 100)
    else:
        try:
            size = Size(text, num_bytes=parse_bytes(text))
        except typer.BadParameter:
            problem = f"{whole!r}: expected a size such as 64GiB or 500MB, or a share of what a store without"
            raise _wrong(f"{problem} limits has at the end, such as 10%") from None
    if not (size.num_bytes or size.share):
        raise _wrong(f"{whole!r} has no room for anything")
    return size


def check_evictions(text: str | None, default: str) -> tuple[str, ...]:
    """Policies of eviction, with commas between. Raises a usage error for another word."""
    from delta_tree import EVICTION_QUEUES

    words = tuple(dict.fromkeys(word.strip() for word in (text or default).split(",") if word.strip()))
    unknown = [word for word in words if word not in EVICTION_QUEUES]
    if unknown or not words:
        expected = ", ".join(EVICTION_QUEUES)
        raise typer.BadParameter(f"expected some of {expected}, got {text!r}", param_hint="--eviction")
    return words


def _wrong(problem: str) -> typer.BadParameter:
    return typer.BadParameter(problem, param_hint=_FLAG)
