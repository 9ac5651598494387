"""
S3-FIFO (Yang et al., SOSP 2023), by sizes: a new entry waits in a small queue, and leaves soon unless it is
used again.

    small    a tenth of all sizes. The oldest entry moves to main if it was used again twice or more;
             otherwise it leaves, and its name is remembered
    main     the oldest entry goes round again if it has a use left, which is spent; otherwise it leaves
    ghost    names of what left small, as many as main has entries. An entry whose name is found here goes
             to main at once
"""

from collections import OrderedDict
from collections.abc import Container, Hashable, Iterator
from dataclasses import dataclass

from delta_tree.eviction_queue import EvictionQueue, K, Use

_SMALL = 0.1  # share of all sizes
_MOST_USES = 3  # more uses do not count
_MIN_GHOSTS = 16


@dataclass(slots=True, eq=False)
class _Waiting:
    use: Use
    num_uses: int = 0  # since it entered this queue, less one for each time that it was spared


class S3FifoQueue(EvictionQueue[K]):
    """See above. A use costs O(1). So does `first`, amortised, which moves entries between the queues."""

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
        held = self._small.get(entry) or self._main.get(entry)
        if held is not None:
            held.num_uses = min(_MOST_USES, held.num_uses + 1)
            held.use = use._replace(name=held.use.name, size=held.use.size)
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
