"""
The interface of eviction policies: a queue of entries that compete for room, and which of them leaves first.

Entries are prompts of a tree, or segments in memory. Pinned ones are not in a queue; the caller of `first`
names those that must stay for now.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)

_MIN_STALE = 64  # stale entries that a heap may hold, however few entries there are


class Use(NamedTuple):
    """What is known of an entry that is used now. Compared by worth, then place, as `CopiesQueue` needs."""

    worth: float  # the floor + 1 + `copied`
    place: int  # in the order of all uses
    size: int  # in tokens or in bytes, the same unit for all entries of a queue
    copied: float = 0.0  # tokens copied from it for other texts / its tokens
    depth: int = 1  # 1 + the depth of the prompt on which it builds, if any
    share: float = 1.0  # the share of the entry that is used
    name: Hashable = None  # by which it is remembered after it left; None: not remembered
    earlier: tuple[Hashable, ...] = ()  # names by which it, or a prompt that it continues, may be remembered


class EvictionQueue(ABC, Generic[K]):
    """Entries in the order of their eviction. For one thread at a time."""

    needs_names = False  # whether the first `use` of an entry must have `name` and `earlier`

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def entries(self) -> Iterator[tuple[K, Use]]:
        """Return all entries with their last uses, in no particular order."""

    @abstractmethod
    def last_use(self, entry: K) -> Use | None:
        """Return the last use of an entry; None if it is not in the queue."""

    @abstractmethod
    def use(self, entry: K, use: Use) -> None:
        """Add an entry, or count a use of it."""

    def relieve(self, entry: K) -> None:
        """
        Note that a newer entry holds what was used of this one since it was last used as a whole: then only
        the rest of it is at stake. Most policies make no difference.
        """

    @abstractmethod
    def remove(self, entry: K, *, for_room: bool = False) -> None:
        """Take an entry out; an unknown one is ignored. `for_room`: its name may be remembered."""

    @abstractmethod
    def first(self, without: Container[K] = ()) -> tuple[Use, K] | None:
        """Return the entry to evict first, not in `without`, with its last use; None if there is none."""


class _LastUses(EvictionQueue[K]):
    """Remembers the last use of each entry, and nothing about entries that have left."""

    _uses: dict[K, Use]

    def __len__(self) -> int:
        return len(self._uses)

    def entries(self) -> Iterator[tuple[K, Use]]:
        return iter(self._uses.items())

    def last_use(self, entry: K) -> Use | None:
        return self._uses.get(entry)

    def remove(self, entry: K, *, for_room: bool = False) -> None:
        self._uses.pop(entry, None)


class RecencyQueue(_LastUses[K]):
    """Least recently used first."""

    _uses: OrderedDict[K, Use]

    def __init__(self) -> None:
        self._uses = OrderedDict()

    def use(self, entry: K, use: Use) -> None:
        self._uses[entry] = use._replace(worth=0.0)
        self._uses.move_to_end(entry)

    def first(self, without: Container[K] = ()) -> tuple[Use, K] | None:
        return next(((use, entry) for entry, use in self._uses.items() if entry not in without), None)


class CopiesQueue(_LastUses[K]):
    """
    Least recently used first, weighted by reuse, with dynamic aging (after LFU-DA, Arlitt et al., 2000).

        worth = floor at the last use + 1 + tokens copied from the entry for other texts / tokens of the entry

    The entry of least worth leaves first; among equals, the least recently used one. A use of a part counts
    like one of the whole until a newer entry holds that part. A use costs O(log n), amortised.
    """

    def __init__(self) -> None:
        self._uses = {}
        self._before_part: dict[K, Use] = {}  # where parts were used since: the last use of the whole
        self._heap: list[tuple[Use, K]] = []

    def last_whole_use(self, entry: K) -> Use | None:
        """Return the last use of an entry that no `relieve` takes back; None if it is not in the queue."""
        return self._before_part.get(entry) or self._uses.get(entry)

    def use(self, entry: K, use: Use) -> None:
        known = self._uses.get(entry)
        if known is not None and use.share < 1 and use.copied <= known.copied:
            self._before_part.setdefault(entry, known)
        else:
            self._before_part.pop(entry, None)
        self._rank(entry, use)

    def relieve(self, entry: K) -> None:
        before = self._before_part.pop(entry, None)
        if before is not None:
            self._rank(entry, before)

    def remove(self, entry: K, *, for_room: bool = False) -> None:
        super().remove(entry)
        self._before_part.pop(entry, None)

    def _rank(self, entry: K, use: Use) -> None:
        self._uses[entry] = use
        heappush(self._heap, (use, entry))
        if len(self._heap) > 2 * len(self._uses) + _MIN_STALE:  # mostly stale entries
            self._heap[:] = [(current, each) for each, current in self._uses.items()]
            heapify(self._heap)

    def first(self, without: Container[K] = ()) -> tuple[Use, K] | None:
        heap, passed = self._heap, []
        while heap and (self._uses.get(heap[0][1]) is not heap[0][0] or heap[0][1] in without):
            head = heappop(heap)
            if self._uses.get(head[1]) is head[0]:
                passed.append(head)
        smallest = heap[0] if heap else None
        for head in passed:
            heappush(heap, head)
        return smallest
