"""
Least recently used, where entries that were never used again age faster; how much faster is learned from what
comes back (after ARC: Megiddo and Modha, 2003).

    new      not used again since it came; its age counts 2^lead times
    proven   used again, copied for other texts, or come back after it had left
    ghosts   names of what left each of both. What comes back says which leaves too early: the lead falls if
             it was new, and rises if it was proven

Both are in the order of `CopiesQueue`, and of their heads the older one leaves. A proven one does so only if
its worth is not above that of the other: copies for other texts count as there. With a lead of 0 the order is
that of `CopiesQueue`.
"""

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator

from delta_tree.eviction_queue import CopiesQueue, EvictionQueue, K, Use

_MAX_LEAD = 6.0
_FALL, _RISE = 32.0, 128.0  # of the lead when one comes back, for one ghost of its kind
_MIN_SHARE = 32  # ghosts that are assumed at least
_GHOSTS = 4  # names that are remembered of each kind, for each entry
_MIN_GHOSTS, _MAX_GHOSTS = 64, 1 << 16
_WHOLE = 0.5  # a use of a smaller share does not prove an entry: many have a beginning in common


class AdaptiveQueue(EvictionQueue[K]):
    """See above. A use and `first` cost O(log n), amortised."""

    needs_names = True

    def __init__(self) -> None:
        self._new, self._proven = CopiesQueue[K](), CopiesQueue[K]()
        self._new_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._proven_ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._lead = 0.0
        self._now = 0

    def __len__(self) -> int:
        return len(self._new) + len(self._proven)

    def entries(self) -> Iterator[tuple[K, Use]]:
        for queue in (self._new, self._proven):
            yield from queue.entries()

    def last_use(self, entry: K) -> Use | None:
        return self._new.last_use(entry) or self._proven.last_use(entry)

    def use(self, entry: K, use: Use) -> None:
        self._now = max(self._now, use.place)
        last, before = self.last_use(entry), self._new.last_whole_use(entry)
        if last is None:
            (self._proven if self._comes_back(use) else self._new).use(entry, use)
            return
        use = use._replace(name=last.name)
        if before is None:
            self._proven.use(entry, use)
        elif use.share < _WHOLE and use.copied <= last.copied:
            self._new.use(entry, use)
        else:
            self._new.remove(entry)
            self._proven.use(entry, before)
            self._proven.use(entry, use)

    def relieve(self, entry: K) -> None:
        for queue in (self._new, self._proven):
            queue.relieve(entry)

    def remove(self, entry: K, *, for_room: bool = False) -> None:
        last, is_new = self.last_use(entry), self._new.last_use(entry) is not None
        for queue in (self._new, self._proven):
            queue.remove(entry)
        if for_room and last is not None and last.name is not None:
            ghosts = self._new_ghosts if is_new else self._proven_ghosts
            ghosts[last.name] = None
            ghosts.move_to_end(last.name)
            while len(ghosts) > min(_MAX_GHOSTS, max(_MIN_GHOSTS, _GHOSTS * len(self))):
                ghosts.popitem(last=False)

    def first(self, without: Container[K] = ()) -> tuple[Use, K] | None:
        new, proven = self._new.first(without), self._proven.first(without)
        if new is None or proven is None:
            return new or proven
        is_older = self._age(proven[0]) > self._age(new[0]) * 2.0**self._lead
        return proven if is_older and proven[0].worth <= new[0].worth else new

    def _age(self, use: Use) -> int:
        return self._now + 1 - use.place

    def _comes_back(self, use: Use) -> bool:
        """Return whether an entry had left, and learn from it."""
        for name in use.earlier:
            if name in self._new_ghosts:
                self._lead = max(0.0, self._lead - _FALL / max(_MIN_SHARE, len(self._new_ghosts)))
                del self._new_ghosts[name]
                return True
            if name in self._proven_ghosts:
                rise = _RISE / max(_MIN_SHARE, len(self._proven_ghosts))
                self._lead = min(_MAX_LEAD, self._lead + rise)
                del self._proven_ghosts[name]
                return True
        return False
