"""
Rows of a live replay -> figures: measured times, what the server reports, what was predicted.

Shares are of each side's own token count: the replay's for predictions, the server's for its reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from kvshare.replay.counts import milliseconds
from kvshare.replay.results import Document, Row

_SHARE_EDGES: Final = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 2.0)

# What a server's chat template may add to messages that were written without it, and leave out of them.
_MAX_PREAMBLE: Final = 32  # a default system prompt, a date
_MAX_MORE_PER_MESSAGE: Final = 8
_MAX_LESS_PER_MESSAGE: Final = 4
_MAX_OFF_PER_PROMPT: Final = 1  # the token of the beginning


def summarise(rows: Sequence[Row], policies: Sequence[str]) -> Document:
    """The figures of `live.json`; `policies` predicted."""
    served = [row for row in rows if row["error"] is None]
    known = [row for row in served if row["num_cached"] is not None and row["num_prompt_tokens"]]
    shares = [row["num_cached"] / row["num_prompt_tokens"] for row in known]
    num_prompt = sum(row["num_prompt_tokens"] for row in known)
    num_cached = sum(row["num_cached"] for row in known)
    by_share = [
        (low, [row for row, share in zip(known, shares, strict=True) if low <= share < high])
        for low, high in pairwise(_SHARE_EDGES)
    ]
    return {
        "num_requests": len(rows),
        "num_failed": len(rows) - len(served),
        "errors": dict(sorted(Counter(row["error"] for row in rows if row["error"]).items())),
        "ttft_ms": _ttft_ms(served),
        "ttft_ms_by_cached_share": [
            {"from": low, **_ttft_ms(some), "num_requests": len(some)} for low, some in by_share
        ],
        "reported": {
            "num_requests": len(known),
            "num_prompt_tokens": num_prompt,
            "num_cached_tokens": num_cached,
            "token_hit_rate": num_cached / max(1, num_prompt),
        },
        "token_counts": _token_counts(served),
        "predicted": [_agreement(known, shares, policy) for policy in policies],
    }


def _token_counts(served: Sequence[Row]) -> Document:
    """
    Prompt tokens as counted here and by the server; `num_unlike`: where a chat template explains it not.
    """
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
        return bool(abs(more) > _MAX_OFF_PER_PROMPT)
    most = _MAX_PREAMBLE + _MAX_MORE_PER_MESSAGE * num_messages
    return not -_MAX_LESS_PER_MESSAGE * num_messages <= more <= most


def _agreement(known: Sequence[Row], shares: Sequence[float], policy: str) -> Document:
    """A policy's predictions against what the server reported (`shares`), for the same requests."""
    hits = np.array([row[f"predicted:{policy}"] for row in known], np.int64)
    tokens = np.array([row["num_tokens"] for row in known], np.int64)
    off = np.abs(hits / np.maximum(1, tokens) - np.array(shares))
    num = max(1, len(known))
    return {
        "arm": policy,
        "token_hit_rate": int(hits.sum()) / max(1, int(tokens.sum())),
        "mean_difference": float(off.sum()) / num,
        "within_5_percent": int((off <= 0.05).sum()) / num,
    }


def _ttft_ms(rows: Sequence[Row]) -> Document:
    return milliseconds([row["ttft_s"] for row in rows]).model_dump()
