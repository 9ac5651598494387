"""
Eviction by worth: the reuse to be expected per byte and time.

The age of an entry is the number of uses of all entries since its last use. The queue learns at which ages
entries are used again, and for each kind of entry how much more or less often than the mean. A kind is how
often the entry was used, on how many others it builds, how long it is, and whether it was copied for other
texts. Names of evicted entries are remembered, to learn which of them would have been used again. The worth
of an entry is the best rate at which it is used again from its age on (an index after Gittins, 1979):

    worth(age) = factor of its kind * max over ends: uses between age and end / time lived between them

The oldest and the youngest entry of each kind are compared, and the one of least worth leaves. Seconds saved
and bytes taken both grow with an entry's tokens, so the worth of a byte contains neither.
"""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from delta_tree.eviction_queue import EvictionQueue, K, Use

_PER_OCTAVE = 2  # buckets for each doubling of the age
_NUM_BUCKETS = 48
_EDGES = np.concatenate(([0.0], 2.0 ** (np.arange(_NUM_BUCKETS) / _PER_OCTAVE)))  # ages that limit buckets
_EDGE_LIST: list[float] = _EDGES.tolist()
_MIDDLES = (_EDGES[:-1] + _EDGES[1:]) / 2
_FIRST_USED, _FIRST_LEFT = 0.02, 1.0  # assumed in each bucket at the start: older entries are worth less
_PRIOR = 10.0  # uses: the weight of the mean over all kinds in the factor of one kind
_LEARN_EVERY = 128  # observations; an eighth of the number of entries if that is more
_KEPT = 0.97  # the weight of earlier observations each time that it learns: traffic changes
_SAMPLE = 4096  # at most so many entries, and so many names, are looked at each time that it learns
_GHOSTS = 4  # names that are remembered, for each entry
_MIN_GHOSTS = 64
_WHOLE = 0.5  # a use of a smaller share of an entry does not count
_MOST_USES = 3
_MOST_DEPTH = 3


class _Kind(NamedTuple):
    num_uses: int
    depth: int
    length: int  # in steps of two octaves
    is_copied: bool


@dataclass(slots=True, eq=False)
class _Held:
    line: int  # the index of its kind
    num_uses: int
    use: Use


def bucket(age: int) -> int:
    """Return the bucket of an age."""
    return min(_NUM_BUCKETS, bisect_right(_EDGE_LIST, age)) - 1


def exposures(counted: NDArray[np.float64]) -> NDArray[np.float64]:
    """
    Return the total time that entries lived in each bucket of age, where `counted` of them ended in each.

    Shapes:  (..., B) -> (..., B)
    """
    longer = counted.sum(axis=-1, keepdims=True) - np.cumsum(counted, axis=-1)
    lived: NDArray[np.float64] = longer * np.diff(_EDGES) + counted * (_MIDDLES - _EDGES[:-1])
    return lived


def best_rates(used: NDArray[np.float64], lived: NDArray[np.float64]) -> NDArray[np.float64]:
    """
    Return the best rate of use from each age on.

    `used`: how many entries were used again in each bucket of age; `lived`: the time they lived there in all.
    Shapes:  used and lived (B,), lived above 0 -> (B,)
    """

    def between(values: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the sums from each bucket to each later one: (B,) -> (B, B)."""
        sums = np.cumsum(values)
        return sums[None, :] - (sums - values)[:, None]

    is_later = np.triu(np.ones((_NUM_BUCKETS, _NUM_BUCKETS), np.bool_))
    rates = np.where(is_later, between(used), 0.0) / np.where(is_later, between(lived), 1.0)
    best: NDArray[np.float64] = rates.max(axis=1)
    return best


class _Ages:
    """For each kind: how many entries were used again at which age, and how many left unused."""

    def __init__(self) -> None:
        self._used = np.zeros((0, _NUM_BUCKETS))
        self._left = np.zeros((0, _NUM_BUCKETS))
        self.worth: list[list[float]] = []

    def add_kind(self) -> None:
        """Add a kind of which nothing has been observed."""
        nothing = np.zeros((1, _NUM_BUCKETS))
        self._used, self._left = np.vstack((self._used, nothing)), np.vstack((self._left, nothing))
        self.learn(self.waiting())

    def note(self, kind: int, age: int, *, is_used: bool) -> None:
        (self._used if is_used else self._left)[kind, bucket(age)] += 1

    def waiting(self) -> NDArray[np.float64]:
        """Return an array of zeros, to be filled for `learn`."""
        return np.zeros_like(self._left)

    def learn(self, waiting: NDArray[np.float64]) -> None:
        """
        Compute the worth of each kind at each age from what was observed.

        Shapes:  waiting (K, B): how many entries have that age now and may still be used again
        """
        used = self._used.sum(axis=0) + _FIRST_USED
        lived = exposures(self._used + self._left + waiting)
        of_all = lived.sum(axis=0) + exposures(np.full(_NUM_BUCKETS, _FIRST_USED + _FIRST_LEFT))
        expected = lived @ (used / of_all)
        factors = (self._used.sum(axis=1) + _PRIOR) / (expected + _PRIOR)
        self.worth = np.outer(factors, best_rates(used, of_all)).tolist()

    def fade(self) -> None:
        """Reduce the weight of what was observed so far."""
        self._used *= _KEPT
        self._left *= _KEPT


class WorthQueue(EvictionQueue[K]):
    """See above. A use costs O(1), `first` O(kinds)."""

    needs_names = True

    def __init__(self) -> None:
        self._ages = _Ages()
        self._kinds: dict[_Kind, int] = {}
        self._lines: list[OrderedDict[K, None]] = []  # of each kind, the oldest first
        self._held: dict[K, _Held] = {}
        self._ghosts: OrderedDict[Hashable, _Held] = OrderedDict()
        self._now = 0
        self._num_observed = 0

    def __len__(self) -> int:
        return len(self._held)

    def entries(self) -> Iterator[tuple[K, Use]]:
        return ((entry, held.use) for entry, held in self._held.items())

    def last_use(self, entry: K) -> Use | None:
        held = self._held.get(entry)
        return None if held is None else held.use

    def use(self, entry: K, use: Use) -> None:
        self._now = max(self._now, use.place)
        if use.share < _WHOLE and entry in self._held:
            return  # a beginning that many have in common says nothing of the rest
        held = self._held.pop(entry, None)
        if held is not None:
            del self._lines[held.line][entry]
        before, num_uses, depth = held or self._ghost_of(use), 0, use.depth
        if before is not None:
            self._observe(before, is_used=True)
            if held is not None or before.use.name == use.name:
                num_uses, depth = before.num_uses + 1, before.use.depth
            else:
                depth = max(depth, before.use.depth + 1)
        name = use.name if held is None else held.use.name
        use = use._replace(worth=0.0, name=name, depth=depth)
        line = self._line(num_uses, use)
        self._held[entry] = _Held(line, num_uses, use)
        self._lines[line][entry] = None

    def remove(self, entry: K, *, for_room: bool = False) -> None:
        held = self._held.pop(entry, None)
        if held is None:
            return
        del self._lines[held.line][entry]
        if for_room and held.use.name is not None:
            self._ghosts[held.use.name] = held
            self._ghosts.move_to_end(held.use.name)
        elif for_room:
            self._observe(held, is_used=False)
        while len(self._ghosts) > max(_MIN_GHOSTS, _GHOSTS * len(self._held)):
            self._observe(self._ghosts.popitem(last=False)[1], is_used=False)

    def first(self, without: Container[K] = ()) -> tuple[Use, K] | None:
        able = [entry for line in self._lines for entry in _ends(line, without)]
        if not able:
            return None
        worth, _, entry = min((self._worth(each), self._held[each].use.place, each) for each in able)
        return self._held[entry].use._replace(worth=worth), entry

    def _worth(self, entry: K) -> float:
        held = self._held[entry]
        return self._ages.worth[held.line][bucket(self._now - held.use.place)]

    def _line(self, num_uses: int, use: Use) -> int:
        kind = _Kind(
            min(_MOST_USES, num_uses), min(_MOST_DEPTH, use.depth), use.size.bit_length() // 2, use.copied > 0
        )
        if kind not in self._kinds:
            self._kinds[kind] = len(self._lines)
            self._lines.append(OrderedDict())
            self._ages.add_kind()
        return self._kinds[kind]

    def _ghost_of(self, use: Use) -> _Held | None:
        found = [self._ghosts.pop(name, None) for name in use.earlier]
        return next((each for each in found if each is not None), None)

    def _observe(self, held: _Held, *, is_used: bool) -> None:
        self._ages.note(held.line, self._now - held.use.place, is_used=is_used)
        self._num_observed += 1
        if self._num_observed >= max(_LEARN_EVERY, len(self._held) // 8):
            self._num_observed = 0
            self._learn()

    def _learn(self) -> None:
        """Learn from what was observed, and from a sample of the entries and names that may yet be used."""
        waiting = self._ages.waiting()
        for group in (self._held, self._ghosts):
            step = 1 + len(group) // _SAMPLE
            for held in islice(group.values(), 0, None, step):
                waiting[held.line, bucket(self._now - held.use.place)] += step
        self._ages.learn(waiting)
        self._ages.fade()


def _ends(line: OrderedDict[K, None], without: Container[K]) -> Iterator[K]:
    """Yield the oldest and the youngest entry of a kind that may leave."""
    for entries in (line, reversed(line)):
        entry = next((each for each in entries if each not in without), None)
        if entry is not None:
            yield entry
