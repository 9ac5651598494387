"""What is kept of millions of values: counts in buckets, and sums. Memory does not grow with the stream."""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Final

from kvshare.replay.requests import TokenizedRequest
from kvshare.replay.results import (
    Data,
    Histogram,
    LogFile,
    Milliseconds,
    Row,
    Stretch,
    Unreadable,
)

LENGTH_EDGES: Final = (0, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
COUNT_EDGES: Final = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30, 50)
SHIFT_EDGES: Final = (0, 1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # absolute
DISTANCE_EDGES: Final = (0.0, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
OVERLAP_EDGES: Final = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
DISTANCE_THRESHOLDS: Final = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)

_RESOLUTION = 1.02  # of times: a percentile is off by at most 1 %
_MAX_STRETCHES = 200
_MAX_KEYS = 60  # of one grouping; a log with more languages than that has made them up


def length_bucket(num_tokens: int) -> str:
    """The key under `by.length`: "512-1023", or "32768-" for the last."""
    for low, high in pairwise(LENGTH_EDGES):
        if num_tokens < high:
            return f"{low}-{high - 1}"
    return f"{LENGTH_EDGES[-1]}-"


class Buckets:
    """Values, for a histogram; what is below the first edge counts in the first bucket."""

    def __init__(self, edges: Sequence[float], values: Sequence[float] = ()) -> None:
        self._edges = edges
        self._counts = [0] * len(edges)
        self._total = 0.0
        self._max = 0.0
        for value in values:
            self.add(value)

    def add(self, value: float) -> None:
        self._counts[max(0, bisect_right(self._edges, value) - 1)] += 1
        self._total += value
        self._max = max(self._max, value)

    def histogram(self) -> Histogram:
        count = sum(self._counts)
        return Histogram(
            edges=tuple(self._edges),
            counts=tuple(self._counts),
            mean=self._total / count if count else 0.0,
            max=self._max,
            count=count,
        )


class Times:
    """Seconds, for percentiles: buckets that each are 2 % wide, from a nanosecond on."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._max = 0.0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self._buckets[round(math.log(max(seconds, 1e-9), _RESOLUTION))] += 1
        self._max = max(self._max, seconds)
        self.total_s += seconds

    def percentile(self, percent: float) -> float:
        """Seconds that so many percent of the values do not exceed."""
        wanted, seen = self._buckets.total() * percent / 100, 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return min(_RESOLUTION**bucket, self._max)
        return 0.0

    def milliseconds(self) -> Milliseconds:
        return Milliseconds(
            mean=1000 * self.total_s / self._buckets.total() if self._buckets else 0.0,
            p50=1000 * self.percentile(50),
            p90=1000 * self.percentile(90),
            p99=1000 * self.percentile(99),
            max=1000 * self._max,
        )


class Series:
    """A stream in stretches of equal length; when there are too many, neighbours are joined."""

    def __init__(self) -> None:
        self._length = 1
        self.stretches: list[Stretch] = []

    def add(self, index: int, *, num_tokens: int, num_hit: int, num_bytes: int) -> None:
        added = Stretch(index, 1, num_tokens, num_hit, num_bytes)
        if self.stretches and self.stretches[-1].num_requests < self._length:
            self.stretches[-1] = _joined(self.stretches[-1], added)
            return
        if len(self.stretches) == _MAX_STRETCHES:
            pairs = zip(self.stretches[::2], self.stretches[1::2], strict=True)
            self.stretches = [_joined(a, b) for a, b in pairs]
            self._length *= 2
        self.stretches.append(added)


def _joined(a: Stretch, b: Stretch) -> Stretch:
    requests, tokens = a.num_requests + b.num_requests, a.num_tokens + b.num_tokens
    return Stretch(a.first, requests, tokens, a.num_hit + b.num_hit, b.num_bytes)


def key_within(known: Collection[str], key: str) -> str:
    """The key, or "other" where it is new and there are many already."""
    return key if key in known or len(known) < _MAX_KEYS else "other"


class DataSummary:
    """Counts requests and hashes their tokens, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._sums: Counter[str] = Counter()
        self._languages: Counter[str] = Counter()
        self._lengths = Buckets(LENGTH_EDGES)
        self._conversations = self._users = self._namespaces = 0

    @property
    def digest(self) -> str:
        """Of everything so far that an arm's figures depend on, meaning aside."""
        return self._hash.hexdigest()

    def add(self, request: TokenizedRequest, common: Row) -> None:
        """`common`: see rows.py; numbers grow with what is new."""
        user = 0 if common["user"] is None else common["user"] + 1
        names = (common["namespace"], user, common["conversation"])
        frame = (*names, request.num_tokens, len(request.answer_ids))
        self._hash.update(b"".join(number.to_bytes(8, "little") for number in frame))
        self._hash.update(request.token_ids.astype("<i4", copy=False).tobytes())
        self._hash.update(request.answer_ids.astype("<i4", copy=False).tobytes())
        self._sums["requests"] += 1
        self._sums["tokens"] += request.num_tokens
        self._sums["answers"] += len(request.answer_ids)
        self._languages[key_within(self._languages, common["language"])] += 1
        self._lengths.add(request.num_tokens)
        self._conversations = max(self._conversations, common["conversation"] + 1)
        self._users = max(self._users, user)
        self._namespaces = max(self._namespaces, common["namespace"] + 1)

    def data(self, files: tuple[LogFile, ...], unreadable: Unreadable) -> Data:
        return Data(
            files=files,
            sha256=self.digest,
            num_requests=self._sums["requests"],
            num_tokens=self._sums["tokens"],
            num_answer_tokens=self._sums["answers"],
            num_conversations=self._conversations,
            num_users=self._users,
            num_namespaces=self._namespaces,
            languages=dict(sorted(self._languages.items())),
            length_histogram=self._lengths.histogram(),
            unreadable=unreadable,
        )
