"""Counts in buckets: what is kept of millions of values. Memory does not grow with the stream."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

from kvshare.replay.results import Document

_RESOLUTION = 1.02  # of times: a percentile is off by at most 1 %
_MAX_STRETCHES = 200


class Histogram:
    """Bucket i holds [edges[i], edges[i + 1]); the last is open, and what is below the first counts in it."""

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = list(edges)
        self._counts = [0] * len(self._edges)
        self._total = 0.0
        self._max = 0.0
        self._count = 0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[max(0, bisect_right(self._edges, value) - 1)] += count
        self._total += value * count
        self._max = max(self._max, value)
        self._count += count

    def document(self) -> Document:
        return {
            "edges": self._edges,
            "counts": self._counts,
            "mean": self._total / self._count if self._count else 0.0,
            "max": self._max,
            "count": self._count,
        }


class Times:
    """Seconds, for percentiles: buckets that each are 2 % wide, from a nanosecond on."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._total = 0.0
        self._max = 0.0
        self._count = 0

    def add(self, seconds: float) -> None:
        self._buckets[round(math.log(max(seconds, 1e-9), _RESOLUTION))] += 1
        self._total += seconds
        self._max = max(self._max, seconds)
        self._count += 1

    @property
    def total_s(self) -> float:
        return self._total

    def percentile(self, percent: float) -> float:
        """Seconds that so many percent of the values do not exceed."""
        wanted, seen = self._count * percent / 100, 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return min(_RESOLUTION**bucket, self._max)
        return 0.0

    def milliseconds(self) -> Document:
        return {
            "mean": 1000 * self._total / self._count if self._count else 0.0,
            "p50": 1000 * self.percentile(50),
            "p90": 1000 * self.percentile(90),
            "p99": 1000 * self.percentile(99),
            "max": 1000 * self._max,
        }


class Series:
    """A stream in stretches of equal length; when there are too many, neighbours are joined."""

    def __init__(self) -> None:
        self._length = 1
        self._stretches: list[list[int]] = []  # first request, requests, tokens, hit tokens, bytes

    def add(self, index: int, *, num_tokens: int, num_hit: int, num_bytes: int) -> None:
        if not self._stretches or self._stretches[-1][1] == self._length:
            if len(self._stretches) == _MAX_STRETCHES:
                self._halve()
            self._stretches.append([index, 0, 0, 0, 0])
        last = self._stretches[-1]
        last[1] += 1
        last[2] += num_tokens
        last[3] += num_hit
        last[4] = num_bytes

    def document(self) -> list[list[int]]:
        return self._stretches

    def _halve(self) -> None:
        pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
        self._stretches = [[a[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], b[4]] for a, b in pairs]
        self._length *= 2
