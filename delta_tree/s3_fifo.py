"""
S3-FIFO (Yang et al., SOSP 2023), by sizes: what is new waits in a small queue, and leaves soon unless it is
used again.

    small    a tenth of all; at its end an entry that was used twice or more moves to the main queue, another
             one leaves, and its name is remembered
    main     at its end an entry that was used goes round again, with a use less; another one leaves
    ghost    names of what left the small queue, as many as main has entries; what comes again is put there
"""

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass

from delta_tree.eviction_queue import EvictionQueue, K, Use

_SMALL = 0.1  # share of all bytes
_MOST_USES = 3  # that count
_MIN_GHOSTS = 16


@dataclass(slots=True, eq=False)
class _Waiting:
    use: Use
    num_uses: int = 0  # since it came, or was spared last


class S3FifoQueue(EvictionQueue[K]):
    """See above. A use costs O(1); `first` moves entries between the queues, and that amortised, too."""

    needs_names = True

    def __init__(self) -> None:
        self._small: OrderedDict[K, _Waiting] = OrderedDict()
        self._main: OrderedDict[K, _Waiting] = OrderedDict()
        self._ghosts: OrderedDict[Hashable, None] = OrderedDict()
        self._small_size = self._main_size = 0

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def entries(self) -> Iterator[tuple[K, Use]]:
        for queue in (self._small, self._main):
            yield from ((entry, each.use) for entry, each in queue.items())

    def last_use(self, entry: K) -> Use | None:
        known = self._small.get(entry) or self._main.get(entry)
        return None if known is None else known.use

    def use(self, entry: K, use: Use) -> None:
        use = use._replace(worth=0.0)
        known = self._small.get(entry) or self._main.get(entry)
        if known is not None:
            known.num_uses = min(_MOST_USES, known.num_uses + 1)
            known.use = use._replace(name=known.use.name, size=known.use.size)
        elif any(self._ghosts.pop(name, self) is None for name in use.earlier):
            self._into_main(entry, _Waiting(use))
        else:
            self._small[entry] = _Waiting(use)
            self._small_size += use.size

    def remove(self, entry: K, *, for_room: bool = False) -> None:
        if (left := self._small.pop(entry, None)) is not None:
            self._small_size -= left.use.size
            if for_room and left.use.name is not None:
                self._ghosts[left.use.name] = None
                while len(self._ghosts) > max(_MIN_GHOSTS, len(self._main)):
                    self._ghosts.popitem(last=False)
        elif (left := self._main.pop(entry, None)) is not None:
            self._main_size -= left.use.size

    def first(self, without: Container[K] = ()) -> tuple[Use, K] | None:
        from_small = self._small_size >= _SMALL * (self._small_size + self._main_size)
        for look in (
            (self._small_head, self._main_head) if from_small else (self._main_head, self._small_head)
        ):
            if (found := look(without)) is not None:
                return found
        return None

    def _small_head(self, without: Container[K]) -> tuple[Use, K] | None:
        while (entry := next((each for each in self._small if each not in without), None)) is not None:
            waiting = self._small[entry]
            if waiting.num_uses <= 1:
                return waiting.use, entry
            del self._small[entry]
            self._small_size -= waiting.use.size
            self._into_main(entry, _Waiting(waiting.use))
        return None

    def _main_head(self, without: Container[K]) -> tuple[Use, K] | None:
        while (entry := next((each for each in self._main if each not in without), None)) is not None:
            waiting = self._main[entry]
            if not waiting.num_uses:
                return waiting.use, entry
            waiting.num_uses -= 1
            self._main.move_to_end(entry)
        return None

    def _into_main(self, entry: K, waiting: _Waiting) -> None:
        self._main[entry] = waiting
        self._main_size += waiting.use.size
