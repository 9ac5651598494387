"""Which replica holds which segment. The bytes stay there; the replicas' journals say what they hold."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field

from delta_tree import SegmentId
from kvshare.kv.tier import Fetched


@dataclass(slots=True, eq=False)
class ReplicaMemory:
    """What one replica holds, and what it may be given; a `Budget` of `sharing/keeper.py`."""

    max_bytes: int = 0  # known when it is connected
    num_bytes: int = 0
    segments: dict[SegmentId, int] = field(default_factory=dict)  # with their bytes
    dropped: list[SegmentId] = field(default_factory=list)  # to be sent to it

    def __contains__(self, segment_id: SegmentId) -> bool:
        return segment_id in self.segments

    def remove(self, segment_id: SegmentId) -> bool:
        """Returns whether it was held."""
        num_bytes = self.segments.pop(segment_id, None)
        self.num_bytes -= num_bytes or 0
        return num_bytes is not None


class RemoteTier:
    """
    A tier whose bytes are in the replicas. Thread-safe.

    What the tree lets go of (`drop`) is still over there: it waits in `take_dropped` to be sent to the
    replica, and `on_drop` is called with the replica's name, from any thread.
    """

    def __init__(self, replicas: Iterable[str]) -> None:
        self.on_drop: Callable[[str], None] | None = None
        self._memories = {name: ReplicaMemory() for name in replicas}
        self._lock = threading.Lock()

    def at(self, replica: str) -> ReplicaMemory:
        """What one replica holds; the segments are changed here only."""
        return self._memories[replica]

    @property
    def memories(self) -> Collection[ReplicaMemory]:
        """What each replica holds."""
        return self._memories.values()

    @property
    def num_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self._memories.values())

    def __contains__(self, segment_id: object) -> bool:
        return any(segment_id in memory.segments for memory in self._memories.values())

    def fetch(self, segment_ids: Iterable[SegmentId]) -> Fetched:
        """No bytes, only what is missing: the plan goes to where they are."""
        return Fetched({}, frozenset(entry for entry in segment_ids if entry not in self))

    def held_by(self, replica: str) -> frozenset[SegmentId]:
        with self._lock:
            return frozenset(self._memories[replica].segments)

    def all_held(self) -> frozenset[SegmentId]:
        return frozenset[SegmentId]().union(*(self.held_by(replica) for replica in self._memories))

    def add(self, replica: str, segments: Mapping[SegmentId, int]) -> None:
        """A replica holds these segments, of so many bytes."""
        memory = self._memories[replica]
        with self._lock:
            for segment_id, num_bytes in segments.items():
                memory.remove(segment_id)
                memory.segments[segment_id] = num_bytes
                memory.num_bytes += num_bytes

    def forget(self, segment_ids: Iterable[SegmentId]) -> None:
        """The replica has dropped these by itself: nothing is to be sent."""
        with self._lock:
            for segment_id in segment_ids:
                self._remove(segment_id)

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """No prompt refers to these any more: their replicas are to drop them, too."""
        holders = set()
        with self._lock:
            for segment_id in segment_ids:
                if (holder := self._remove(segment_id)) is not None:
                    self._memories[holder].dropped.append(segment_id)
                    holders.add(holder)
        if (on_drop := self.on_drop) is not None:
            for holder in holders:
                on_drop(holder)

    def take_dropped(self, replica: str) -> list[SegmentId]:
        """What a replica is yet to drop; the caller sends it."""
        memory = self._memories[replica]
        with self._lock:
            dropped, memory.dropped = memory.dropped, []
        return dropped

    def drop_again(self, replica: str, segment_ids: Iterable[SegmentId]) -> None:
        """They could not be sent to the replica: they are sent with the next."""
        with self._lock:
            self._memories[replica].dropped.extend(segment_ids)

    def _remove(self, segment_id: SegmentId) -> str | None:
        """The replica that held it."""
        return next((name for name, memory in self._memories.items() if memory.remove(segment_id)), None)
