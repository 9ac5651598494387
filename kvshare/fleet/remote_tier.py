"""
Knows which replica holds which segment, as reported in the journals. The bytes stay in the replicas.

Several hold a segment if they share a store (`kvshare vllm --shared-tier`): one has computed it, the others
can read it there.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, field

from delta_tree import SegmentId
from kvshare.kv.tier import Fetched


@dataclass(slots=True, eq=False)
class ReplicaMemory:
    """The segments and the memory limit of one replica; a `Budget`."""

    max_bytes: int = 0  # 0 until the replica is connected
    num_bytes: int = 0
    segments: dict[SegmentId, int] = field(default_factory=dict)  # with the bytes of each
    dropped: list[SegmentId] = field(default_factory=list)  # not sent to the replica yet
    orphans: list[SegmentId] = field(default_factory=list)  # the same, of what others may still use
    on_disk: set[SegmentId] = field(default_factory=set)  # of those not in memory, as it has reported

    def __contains__(self, segment_id: SegmentId) -> bool:
        return segment_id in self.segments

    def remove(self, segment_id: SegmentId) -> bool:
        self.on_disk.discard(segment_id)
        num_bytes = self.segments.pop(segment_id, None)
        self.num_bytes -= num_bytes or 0
        return num_bytes is not None


class _OnAnyDisk(Container[SegmentId]):
    """The segments that are on some replica's disk only."""

    def __init__(self, memories: Collection[ReplicaMemory]) -> None:
        self._memories = memories

    def __contains__(self, segment_id: object) -> bool:
        return any(segment_id in memory.on_disk for memory in self._memories)


class RemoteTier:
    """
    A tier whose bytes are in the replicas. Thread-safe.

    Segments passed to `drop` are still in the replica until it drops them: `take_dropped` returns them for
    sending.
    """

    def __init__(self, replicas: Iterable[str]) -> None:
        self._on_drop: Callable[[str], None] | None = None
        self.memories = {name: ReplicaMemory() for name in replicas}  # their segments are changed here only
        self.on_disk: Container[SegmentId] = _OnAnyDisk(self.memories.values())
        self._lock = threading.Lock()

    def note_places(
        self, replica: str, *, on_disk: Iterable[SegmentId] = (), in_memory: Iterable[SegmentId] = ()
    ) -> None:
        places = self.memories[replica].on_disk
        with self._lock:
            places.difference_update(in_memory)
            places.update(on_disk)

    def call_on_drop(self, on_drop: Callable[[str], None] | None) -> None:
        """Call this from now on, from any thread, with the name of a replica that must drop segments."""
        self._on_drop = on_drop

    @property
    def num_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self.memories.values())

    def __contains__(self, segment_id: object) -> bool:
        return any(segment_id in memory.segments for memory in self.memories.values())

    def fetch(
        self, segment_ids: Iterable[SegmentId], *, within_s: float = math.inf, doubt_s: float = math.inf
    ) -> Fetched:
        """Only which segments are missing, no bytes: the request is sent to the replica that has them."""
        return Fetched({}, frozenset(entry for entry in segment_ids if entry not in self))

    def held_by(self, replica: str) -> frozenset[SegmentId]:
        with self._lock:
            return frozenset(self.memories[replica].segments)

    def add(self, replica: str, segments: Mapping[SegmentId, int]) -> None:
        """A replica holds these segments; the values are their bytes."""
        memory = self.memories[replica]
        with self._lock:
            for segment_id, num_bytes in segments.items():
                memory.num_bytes -= memory.segments.pop(segment_id, 0)
                memory.segments[segment_id] = num_bytes
                memory.num_bytes += num_bytes

    def forget(self, segment_ids: Iterable[SegmentId], *, replica: str | None = None) -> None:
        """The replica, or all of them, have dropped these segments already: nothing is sent."""
        memories = self.memories.values() if replica is None else (self.memories[replica],)
        with self._lock:
            for segment_id in segment_ids:
                for memory in memories:
                    memory.remove(segment_id)

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """No prompt uses these segments any more: their replicas must drop them."""
        holders = set()
        with self._lock:
            for segment_id in segment_ids:
                for name, memory in self.memories.items():
                    if memory.remove(segment_id):
                        memory.dropped.append(segment_id)
                        holders.add(name)
        self._send(holders)

    def drop_orphans(self, replica: str, segment_ids: Iterable[SegmentId]) -> None:
        """No prompt here uses them: the replica must drop them, and leave them in a shared store."""
        memory = self.memories[replica]
        with self._lock:
            orphans = [segment_id for segment_id in segment_ids if memory.remove(segment_id)]
            memory.orphans.extend(orphans)
        self._send([replica] if orphans else ())

    def take_dropped(self, replica: str) -> list[SegmentId]:
        """Return the segments that a replica must drop; the caller sends them."""
        memory = self.memories[replica]
        with self._lock:
            dropped, memory.dropped = memory.dropped, []
        return dropped

    def drop_again(self, replica: str, segment_ids: Iterable[SegmentId]) -> None:
        """Sending failed: return these segments with the next `take_dropped`."""
        with self._lock:
            self.memories[replica].dropped.extend(segment_ids)

    def take_orphans(self, replica: str) -> list[SegmentId]:
        """Return the same, of those that stay in a shared store."""
        memory = self.memories[replica]
        with self._lock:
            orphans, memory.orphans = memory.orphans, []
        return orphans

    def orphans_again(self, replica: str, segment_ids: Iterable[SegmentId]) -> None:
        """Sending failed: return these segments with the next `take_orphans`."""
        with self._lock:
            self.memories[replica].orphans.extend(segment_ids)

    def _send(self, holders: Iterable[str]) -> None:
        if (on_drop := self._on_drop) is not None:
            for holder in holders:
                on_drop(holder)
