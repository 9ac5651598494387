"""
The `oracle` policy: the most that copying equal tokens could ever reuse.

A token counts if it lies in a run of at least `min_run` equal tokens that an earlier request of the
namespace had in its prompt or answer: the union of all `min_run`-grams seen so far. Hashes find them, tokens
decide. The last `tail` tokens of a prompt never count. With a tail of 1 the result is what a server could
save, because it always computes the last token of a prompt.

A finite store holds the k-grams used last, at one token's KV each: no store could hold them in less.
"""

import time
from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from delta_tree import Span, TokenIds
from delta_tree.kgrams import kgram_hashes
from kvshare.logs.requests import Requester, any_of
from kvshare.replay.policies.base import CachePolicy, stored_tokens, with_room
from kvshare.replay.requests import Outcome, TokenizedRequest

Hashes = NDArray[np.uint64]
Positions = NDArray[np.int64]
_Level = tuple[Hashes, NDArray[np.uint32]]

_FIRST_LEVEL = 4096


@dataclass(eq=False, kw_only=True)
class OraclePolicy(CachePolicy):
    """All tokens so far in one array, and a table of k-grams for each namespace."""

    family = "oracle"

    min_run: int = 16
    tail: int = 0

    def __post_init__(self) -> None:
        self._tokens = np.zeros(1 << 16, dtype=np.int32)
        self._num_tokens = 0
        self._starts: list[int] = []  # of the requests in `_tokens`
        self._requesters: list[Requester] = []
        self._tables: dict[str, GramTable] = {}
        self._num_grams = 0
        self._recency = None if self.capacity_tokens is None else _Recency(self.capacity_tokens)

    def observe(self, request: TokenizedRequest) -> Outcome:
        began = time.perf_counter()
        table = self._tables.setdefault(request.logged.namespace, GramTable())
        tokens = stored_tokens(request)
        hashes = kgram_hashes(tokens, self.min_run)
        stored = table.find(hashes)
        if self._recency is not None:
            stored = np.where(stored >= self._recency.cutoff, stored, -1)
        num_prompt_grams = max(0, request.num_tokens - self.tail - self.min_run + 1)
        starts = np.flatnonzero(self._is_equal(stored[:num_prompt_grams], tokens))
        hits = _joined(starts, self.min_run) if len(starts) else ()
        donors = {bisect_right(self._starts, at) - 1 for at in np.unique(stored[starts]).tolist()}
        requester = request.logged.requester
        cross_user = any_of(requester.is_other(self._requesters[number]) for number in donors)
        lookup_s = time.perf_counter() - began
        self._store(tokens, requester, table, hashes, stored)
        num_grams = self._num_grams if self._recency is None else self._recency.num_grams
        num_bytes = num_grams * self.context.bytes_per_token
        return Outcome(hits=hits, cross_user=cross_user, lookup_s=lookup_s, num_stored_bytes=num_bytes)

    def _is_equal(self, stored: Positions, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """(N,): whether the k-gram at each position is the one stored at `stored`, token by token."""
        is_equal = stored >= 0
        places = np.flatnonzero(is_equal)
        for offset in range(self.min_run):
            is_equal[places] &= self._tokens[stored[places] + offset] == tokens[places + offset]
        return is_equal

    def _store(
        self, tokens: TokenIds, requester: Requester, table: "GramTable", hashes: Hashes, stored: Positions
    ) -> None:
        start = self._num_tokens
        self._num_tokens += len(tokens)
        self._tokens = with_room(self._tokens, self._num_tokens)
        self._tokens[start : self._num_tokens] = tokens
        self._starts.append(start)
        self._requesters.append(requester)
        positions = np.arange(start, start + len(hashes), dtype=np.int64)
        if self._recency is not None:
            self._recency.use(hashes, stored, positions)
            table.put(hashes, positions)
        else:
            is_new = stored < 0  # a k-gram stays where it was first seen
            self._num_grams += len(np.unique(hashes[is_new]))
            table.put(hashes[is_new][::-1], positions[is_new][::-1])


class _Recency:
    """Least-recently-used eviction: only the `capacity` k-grams with the latest positions are stored."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._is_latest = np.zeros(1 << 16, dtype=np.bool_)  # of each position: no later one is equal
        self.cutoff = 0  # lower positions are evicted
        self.num_grams = 0

    def use(self, hashes: Hashes, old: Positions, new: Positions) -> None:
        """Move k-grams from their old positions (-1: none) to new ones; of equal k-grams the last counts."""
        if not len(new):
            return
        last, end = _last_of_each(hashes), int(new[-1]) + 1
        left = np.unique(old[old >= 0])
        self._is_latest = with_room(self._is_latest, end)
        self._is_latest[left] = False
        self._is_latest[new[last]] = True
        self.num_grams += len(last) - len(left)
        if self.num_grams > self._capacity:
            latest = np.flatnonzero(self._is_latest[self.cutoff : end])
            self.cutoff += int(latest[self.num_grams - self._capacity])
            self.num_grams = self._capacity


def _joined(starts: Positions, length: int) -> tuple[Span, ...]:
    """Spans of `length` from each of the ascending `starts`, joined where they touch or overlap."""
    ends = np.flatnonzero(np.diff(starts) > length)
    firsts, lasts = starts[np.append(0, ends + 1)], starts[np.append(ends, len(starts) - 1)]
    return tuple(map(Span, firsts.tolist(), (lasts + length).tolist()))


class GramTable:
    """
    Hash -> position, for millions of k-grams in sorted arrays. Positions are below 2**32.

    Levels of doubling size, as in a log-structured store: adding is cheap, and looking up many at once is a
    binary search per level. It takes 12 bytes per k-gram, a dictionary takes 150.
    """

    def __init__(self) -> None:
        self._levels: list[_Level] = []  # largest first, so that a hash's last position comes last

    def find(self, hashes: Hashes) -> Positions:
        """Return the last position of each hash, -1 for unknown ones. Shapes: (N,) -> (N,)."""
        places_found = np.full(len(hashes), -1, dtype=np.int64)
        for known, positions in self._levels:
            places = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            is_known = known[places] == hashes
            places_found[is_known] = positions[places[is_known]]
        return places_found

    def put(self, hashes: Hashes, positions: Positions) -> None:
        """Set the positions of hashes, known or not; of equal hashes the last one counts."""
        if not len(hashes):
            return
        levels, level = self._levels, _level(hashes, positions.astype(np.uint32))
        # A level is merged with the one before while it is more than half of that, or that one is tiny.
        while levels and (len(level[0]) * 2 > len(levels[-1][0]) or len(levels[-1][0]) < _FIRST_LEVEL):
            known, known_at = levels.pop()
            level = _level(np.concatenate((known, level[0])), np.concatenate((known_at, level[1])))
        levels.append(level)


def _level(hashes: Hashes, positions: NDArray[np.uint32]) -> _Level:
    """Ascending by hash; of equal hashes the last one counts."""
    last = _last_of_each(hashes)
    return hashes[last], positions[last]


def _last_of_each(hashes: Hashes) -> Positions:
    _, from_end = np.unique(hashes[::-1], return_index=True)
    indices: Positions = len(hashes) - 1 - from_end
    return indices
