"""
Which segments of a stack are in memory, which of them are not below yet, and which leave memory when it is
full. A server's stack and a replay share this code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator
from itertools import count
from typing import Generic

from delta_tree import EVICTION_QUEUES, EvictionQueue, SegmentId, Use
from kvshare.kv.tier import SizedT


def queue_of_segments(eviction: str) -> EvictionQueue[SegmentId]:
    """
    Return the queue for a value of `store.eviction`.

    Segments are used as a whole, so `copies` means the order of `lru`, whose queue is faster if many are due.
    """
    return EVICTION_QUEUES["lru" if eviction == "copies" else eviction]()


class NearMemory(Generic[SizedT]):
    """
    Segments in memory. Those that are due (in memory only) stay; `queue` decides which of the others leave.

    For one thread at a time.
    """

    def __init__(self, max_bytes: int, queue: EvictionQueue[SegmentId]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.num_due_bytes = 0
        self._queue = queue
        self._held: dict[SegmentId, SizedT] = {}
        self._due: OrderedDict[SegmentId, SizedT] = OrderedDict()  # the oldest first
        self._places = count()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._held

    def items(self) -> Iterator[tuple[SegmentId, SizedT]]:
        return iter(self._held.items())

    @property
    def due(self) -> Collection[SegmentId]:
        return self._due.keys()

    def put(self, segment_id: SegmentId, entry: SizedT, *, is_due: bool) -> None:
        """Hold another segment. `is_due`: it is new, and in memory only; else it was read from below."""
        self._held[segment_id] = entry
        self.num_bytes += entry.num_bytes
        if is_due:
            self.owe(segment_id)
        self._note_use(segment_id, entry)
        self._shrink()

    def owe(self, segment_id: SegmentId) -> None:
        """Mark a segment that is held as due: from now on it is in memory only."""
        entry = self._due[segment_id] = self._held[segment_id]
        self.num_due_bytes += entry.num_bytes

    def written(self, segment_id: SegmentId) -> bool:
        """Mark a segment as no longer due: it is below now, or gone. Returns whether it was due."""
        entry = self._due.pop(segment_id, None)
        self.num_due_bytes -= 0 if entry is None else entry.num_bytes
        return entry is not None

    def use(self, segment_ids: Iterable[SegmentId]) -> dict[SegmentId, SizedT]:
        """Return those of the segments that are in memory, and count a use of each."""
        held = {each: entry for each in segment_ids if (entry := self._held.get(each)) is not None}
        for segment_id, entry in held.items():
            self._note_use(segment_id, entry)
        return held

    def forget(self, segment_id: SegmentId, *, for_room: bool = False) -> None:
        """Free a segment's memory; one that is not held is ignored. The segment may come back from below."""
        entry = self._held.pop(segment_id, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
            self._queue.remove(segment_id, for_room=for_room)

    def _note_use(self, segment_id: SegmentId, entry: SizedT) -> None:
        use = Use(1.0, next(self._places), entry.num_bytes, name=segment_id, earlier=(segment_id,))
        self._queue.use(segment_id, use)

    def _shrink(self) -> None:
        """Free segments that are not due until memory is within its limit, or only due ones are left."""
        while self.num_bytes > self.max_bytes:
            head = self._queue.first(self._due)
            if head is None:
                return
            self.forget(head[1], for_room=True)
