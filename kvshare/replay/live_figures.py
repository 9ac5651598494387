"""
Rows of a live replay -> figures: what a user would see, what the server says, what was predicted.

Shares are of each side's own tokens: an arm's of the replay's, the server's of those that it counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from kvshare.replay.counts import milliseconds
from kvshare.replay.results import Document, Row

_SHARE_EDGES: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9)

# What a server's chat template may add to messages that were laid out without it, and leave out of them.
_MAX_PREAMBLE: Final = 32  # a default system prompt, a date
_MAX_MORE_A_MESSAGE: Final = 8
_MAX_LESS_A_MESSAGE: Final = 4
_MAX_OFF_A_PROMPT: Final = 1  # the token of the beginning


def summarise(rows: Sequence[Row], arms: Sequence[str]) -> Document:
    """What a user would see, what the server says, what was predicted."""
    served = [row for row in rows if row["error"] is None]
    told = [row for row in served if row["num_cached"] is not None and row["num_prompt_tokens"]]
    num_prompt = sum(row["num_prompt_tokens"] for row in told)
    return {
        "num_requests": len(rows),
        "num_failed": len(rows) - len(served),
        "errors": dict(sorted(Counter(row["error"] for row in rows if row["error"]).items())),
        "ttft_ms": _ttft_ms(served),
        "ttft_ms_by_cached_share": [
            {"from": low, **_ttft_ms(chosen), "num_requests": len(chosen)} for low, chosen in _by_share(told)
        ],
        "reported": {
            "num_requests": len(told),
            "num_prompt_tokens": num_prompt,
            "num_cached_tokens": sum(row["num_cached"] for row in told),
            "token_hit_rate": sum(row["num_cached"] for row in told) / max(1, num_prompt),
        },
        "token_counts": _token_counts(served),
        "predicted": [_agreement(told, arm) for arm in arms],
    }


def _token_counts(served: Sequence[Row]) -> Document:
    """Prompt tokens as counted here and there; `num_unlike`: requests that no chat template explains."""
    counted = [row for row in served if row["num_prompt_tokens"]]
    return {
        "num_requests": len(counted),
        "here": sum(row["num_tokens"] for row in counted),
        "server": sum(row["num_prompt_tokens"] for row in counted),
        "num_unlike": sum(_is_unlike(row) for row in counted),
    }


def _is_unlike(row: Row) -> bool:
    more, num_messages = row["num_prompt_tokens"] - row["num_tokens"], row["num_messages"]
    if not num_messages:
        return bool(abs(more) > _MAX_OFF_A_PROMPT)
    most = _MAX_PREAMBLE + _MAX_MORE_A_MESSAGE * num_messages
    return not -_MAX_LESS_A_MESSAGE * num_messages <= more <= most


def _agreement(told: Sequence[Row], arm: str) -> Document:
    """An arm's predictions against what the server reported, for the same requests."""
    predicted = f"predicted:{arm}"
    num_tokens = sum(row["num_tokens"] for row in told)
    off = [
        abs(row[predicted] / max(1, row["num_tokens"]) - row["num_cached"] / row["num_prompt_tokens"])
        for row in told
    ]
    return {
        "arm": arm,
        "token_hit_rate": sum(row[predicted] for row in told) / max(1, num_tokens),
        "mean_difference": sum(off) / max(1, len(off)),
        "within_5_percent": sum(share <= 0.05 for share in off) / max(1, len(off)),
    }


def _by_share(told: Sequence[Row]) -> Iterator[tuple[float, list[Row]]]:
    for low, high in zip(_SHARE_EDGES, (*_SHARE_EDGES[1:], 2.0), strict=True):
        yield low, [row for row in told if low <= row["num_cached"] / row["num_prompt_tokens"] < high]


def _ttft_ms(rows: Sequence[Row]) -> Document:
    return milliseconds([row["ttft_s"] for row in rows]).model_dump()
