"""Rows of a live replay -> figures: what a user would see, what the server says, what was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from kvshare.replay.histograms import Times
from kvshare.replay.results import Document, Row

_SHARE_EDGES: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)


def summarise(rows: Sequence[Row], arms: Sequence[str]) -> Document:
    """What a user would see, what the server says, what was predicted."""
    served = [row for row in rows if row["error"] is None]
    told = [row for row in served if row["num_cached"] is not None and row["num_prompt_tokens"]]
    num_prompt = sum(row["num_prompt_tokens"] for row in told)
    return {
        "num_requests": len(rows),
        "num_failed": len(rows) - len(served),
        "errors": dict(sorted(Counter(row["error"] for row in rows if row["error"]).items())),
        "ttft_ms": _milliseconds(served),
        "ttft_ms_by_cached_share": [
            {"from": low, **_milliseconds(chosen), "num_requests": len(chosen)}
            for low, chosen in _by_share(told)
        ],
        "reported": {
            "num_requests": len(told),
            "num_prompt_tokens": num_prompt,
            "num_cached_tokens": sum(row["num_cached"] for row in told),
            "token_hit_rate": sum(row["num_cached"] for row in told) / max(1, num_prompt),
        },
        "predicted": [_agreement(told, arm) for arm in arms],
    }


def _agreement(told: Sequence[Row], arm: str) -> Document:
    """An arm's predictions against what the server reported, for the same requests."""
    pairs = [(row[f"predicted:{arm}"], row["num_cached"], row["num_prompt_tokens"]) for row in told]
    num_tokens = max(1, sum(tokens for _, _, tokens in pairs))
    off = [abs(predicted - cached) / tokens for predicted, cached, tokens in pairs]
    return {
        "arm": arm,
        "token_hit_rate": sum(predicted for predicted, _, _ in pairs) / num_tokens,
        "mean_difference": sum(off) / max(1, len(off)),
        "within_5_percent": sum(share <= 0.05 for share in off) / max(1, len(off)),
    }


def _by_share(told: Sequence[Row]) -> Iterator[tuple[float, list[Row]]]:
    for low, high in zip(_SHARE_EDGES, (*_SHARE_EDGES[1:], 2.0), strict=True):
        yield low, [row for row in told if low <= row["num_cached"] / row["num_prompt_tokens"] < high]


def _milliseconds(rows: Sequence[Row]) -> Document:
    times = Times()
    for row in rows:
        times.add(row["ttft_s"])
    return times.milliseconds()
