"""
Which prompts hold a fingerprint: an inverted index in this process's memory, 8 bytes for each of a prompt's.

    posting    fingerprint << 32 | place of the prompt in the arrays of ids and owners
    young      postings of the newest prompts, sorted
    runs       all others: `_PARTS` parts by the lowest bits of the fingerprint, each a few sorted arrays, the
               largest first. Arrays of similar size are merged, so a posting is copied a few times in all

A search finds each fingerprint in each array by bisection. A prompt that is forgotten leaves its postings
until `compacted` makes a copy without them. This file knows no backend.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from vector_index.base import Entry, Hit

Run = NDArray[np.uint64]  # postings, sorted

_HIGH: Final = np.uint64(32)
_LOW: Final = np.uint64(0xFFFF_FFFF)
_PARTS: Final = 8  # a power of two
_YOUNG: Final = 1 << 14  # postings that are sorted again with each prompt
_GROWTH: Final = 4  # times, at least, by which an array is larger than the next; more in each further part,
# so that the parts do not merge their largest arrays at the same time
_SPARSE: Final = 8  # times as many prompts as places that a search finds: then the places are sorted
_FORGOTTEN: Final = -1  # in place of a prompt's id


class Postings:
    """Those of the prompts of many namespaces. Used from one thread; `compacted` may run in another one."""

    def __init__(self) -> None:
        self._young: Run = np.empty(0, np.uint64)
        self._runs: list[list[Run]] = [[] for _ in range(_PARTS)]
        self._ids = np.empty(0, np.int64)  # by place, with room for more
        self._owners = np.empty(0, np.uint32)  # by place: numbers of namespaces
        self._num_places = 0
        self._place_of: dict[int, int] = {}  # by prompt id
        self._namespaces: list[str] = []  # by number
        self._numbers: dict[str, int] = {}  # of namespaces
        self._num_prompts: Counter[str] = Counter()  # by namespace

    def count(self, namespace: str | None = None) -> int:
        """Return how many prompts a namespace, or all of them, have."""
        return len(self._place_of) if namespace is None else self._num_prompts[namespace]

    def add(self, entries: Sequence[Entry]) -> None:
        """Add prompts, each in place of one with its id."""
        self._reserve(len(entries))
        added = [self._young, *(self._entered(entry) for entry in entries)]
        self._young = _merged(added)
        if len(self._young) > _YOUNG:
            self._settle()

    def owned(self, namespace: str, prompt_ids: Iterable[int]) -> list[int]:
        """Return those of the prompts that this namespace has."""
        owner = self._numbers.get(namespace, -1)
        places = ((prompt_id, self._place_of.get(prompt_id)) for prompt_id in prompt_ids)
        return [
            prompt_id for prompt_id, place in places if place is not None and self._owners[place] == owner
        ]

    def forget(self, prompt_ids: Iterable[int]) -> None:
        """Forget prompts; unknown ids are ignored."""
        for prompt_id in prompt_ids:
            place = self._place_of.pop(prompt_id, None)
            if place is not None:
                self._ids[place] = _FORGOTTEN
                self._num_prompts[self._namespaces[self._owners[place]]] -= 1

    def search(self, namespace: str, prints: NDArray[np.uint32], limit: int) -> list[tuple[str, Hit]]:
        """
        Return the prompts of a namespace that hold the most of these fingerprints; of equals the last added
        first.

        Returns: (namespace as stored, hit), best first; the score is how many are shared
        """
        owner = self._numbers.get(namespace)
        if owner is None or not limit:
            return []
        places, counts = self._counted(self._holders(np.sort(prints).astype(np.uint64)))
        own = (self._owners[places] == owner) & (self._ids[places] != _FORGOTTEN)
        ranked = counts[own].astype(np.uint64) << _HIGH | places[own].astype(np.uint64)
        if len(ranked) > limit:
            ranked = np.partition(ranked, len(ranked) - limit)[-limit:]
        return [self._hit(int(each)) for each in np.sort(ranked)[::-1]]

    @property
    def is_worth_compacting(self) -> bool:
        """Return whether more than half of the places are those of forgotten prompts."""
        return self._num_places > _YOUNG and 2 * len(self._place_of) < self._num_places

    def compacted(self) -> Postings:
        """Return a copy without forgotten prompts. Searches may go on meanwhile, changes may not."""
        copy = Postings()
        alive = np.flatnonzero(self._ids[: self._num_places] != _FORGOTTEN)
        place_now = np.full(self._num_places, _LOW, np.uint64)  # by former place; `_LOW`: none
        place_now[alive] = np.arange(len(alive), dtype=np.uint64)
        numbers, owners = np.unique(self._owners[alive], return_inverse=True)
        copy._ids, copy._owners = self._ids[alive], owners.astype(np.uint32)
        copy._namespaces = [self._namespaces[number] for number in numbers]
        copy._numbers = {name: number for number, name in enumerate(copy._namespaces)}
        copy._num_prompts = Counter({name: self._num_prompts[name] for name in copy._namespaces})
        copy._num_places = len(alive)
        copy._place_of = {int(prompt_id): place for place, prompt_id in enumerate(copy._ids)}
        copy._young = _moved(self._young, place_now)
        copy._runs = [
            [_merged([_moved(run, place_now) for run in runs])] if runs else [] for runs in self._runs
        ]
        return copy

    def _entered(self, entry: Entry) -> Run:
        """Give a prompt a place, and return its postings."""
        self.forget([entry.prompt_id])
        place, self._num_places = self._num_places, self._num_places + 1
        number = self._numbers.setdefault(entry.namespace, len(self._namespaces))
        if number == len(self._namespaces):
            self._namespaces.append(entry.namespace)
        self._ids[place], self._owners[place] = entry.prompt_id, number
        self._place_of[entry.prompt_id] = place
        self._num_prompts[entry.namespace] += 1
        return entry.fingerprints.astype(np.uint64) << _HIGH | np.uint64(place)

    def _reserve(self, number: int) -> None:
        """Have room for so many more places."""
        needed = self._num_places + number
        if needed > len(self._ids):
            room = max(needed, 2 * len(self._ids))
            self._ids, self._owners = np.resize(self._ids, room), np.resize(self._owners, room)

    def _settle(self) -> None:
        """Move the young postings into the runs of their parts."""
        parts = _parts_of(self._young >> _HIGH)
        for number, runs in enumerate(self._runs):
            runs.append(self._young[parts == number])
            while len(runs) > 1 and len(runs[-2]) < (_GROWTH + number) * len(runs[-1]):
                last = runs.pop()
                runs[-1] = _merged([runs[-1], last])
        self._young = self._young[:0].copy()

    def _holders(self, prints: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """Return the places of the prompts that hold a fingerprint, once for each that they hold."""
        places, parts = [_places(self._young, prints)], _parts_of(prints)
        for number, runs in enumerate(self._runs):
            asked = prints[parts == number]
            places += [_places(run, asked) for run in runs if len(asked)]
        return np.concatenate(places)

    def _counted(self, places: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return each of the places once, ascending, and how often it is among them."""
        if self._num_places > _SPARSE * len(places):
            return np.unique(places.astype(np.int64), return_counts=True)
        counts = np.bincount(places)
        found = np.flatnonzero(counts)
        return found, counts[found]

    def _hit(self, ranked: int) -> tuple[str, Hit]:
        place = ranked & int(_LOW)
        return self._namespaces[self._owners[place]], Hit(int(self._ids[place]), float(ranked >> int(_HIGH)))


def _parts_of(prints: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # Winnowing takes the smallest hashes, so the high bits would make parts of very different sizes.
    return prints & np.uint64(_PARTS - 1)


def _merged(runs: Sequence[Run]) -> Run:
    """Return one sorted array of sorted ones: a stable sort finds and merges them."""
    merged: Run = np.sort(np.concatenate(runs), kind="stable")
    return merged


def _moved(run: Run, place_now: NDArray[np.uint64]) -> Run:
    """Return the postings of those that have a place now; the order stays, as that of the places does."""
    places = place_now[run & _LOW]
    is_there = places != _LOW
    moved: Run = (run[is_there] >> _HIGH << _HIGH) | places[is_there]
    return moved


def _places(run: Run, prints: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """Return the places in a run's postings of these fingerprints, which ascend."""
    if not len(run):
        return np.empty(0, np.uint32)
    first = np.searchsorted(run, prints << _HIGH)
    is_there = run[np.minimum(first, len(run) - 1)] >> _HIGH == prints
    first, prints = first[is_there], prints[is_there]  # most are in no run, or in one
    if not len(first):
        return np.empty(0, np.uint32)
    lengths = np.searchsorted(run, prints << _HIGH | _LOW) - first
    ends = np.cumsum(lengths)
    # The low halves; places have 32 bits.
    found = run[np.arange(ends[-1]) + np.repeat(first - ends + lengths, lengths)]
    places: NDArray[np.uint32] = found.astype(np.uint32)
    return places
