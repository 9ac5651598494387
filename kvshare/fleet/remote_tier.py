"""Knows which replica holds which segment, as reported in the journals. The bytes stay in the replicas."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Container, Iterable, Mapping
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

    Segments passed to `drop` are still in the replica until it drops them: `take_dropped` returns them for
    sending.
    """

    def __init__(self, replicas: Iterable[str]) -> None:
        self._on_drop: Callable[[str], None] | None = None
        self.memories = {name: ReplicaMemory() for name in replicas}  # their segments are changed here only
        self._on_disk: set[SegmentId] = set()
        self._lock = threading.Lock()

    @property
    def on_disk(self) -> Container[SegmentId]:
        """Return the segments that are on a replica's disk only, as it has reported."""
        return self._on_disk

    def note_places(self, *, on_disk: Iterable[SegmentId] = (), in_memory: Iterable[SegmentId] = ()) -> None:
        """Note the places of segments that are held, or will be."""
        with self._lock:
            self._on_disk.difference_update(in_memory)
            self._on_disk.update(on_disk)

    def call_on_drop(self, on_drop: Callable[[str], None] | None) -> None:
        """Call this from now on, from any thread, with the name of a replica that must drop segments."""
        self._on_drop = on_drop

    @property
    def num_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self.memories.values())

    def __contains__(self, segment_id: object) -> bool:
        return any(segment_id in memory.segments for memory in self.memories.values())

    def fetch(self, segment_ids: Iterable[SegmentId], *, within_s: float = math.inf) -> Fetched:
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
                memory.remove(segment_id)
                memory.segments[segment_id] = num_bytes
                memory.num_bytes += num_bytes

    def forget(self, segment_ids: Iterable[SegmentId]) -> None:
        """The replicas have dropped these segments already: nothing is sent."""
        with self._lock:
            for segment_id in segment_ids:
                self._remove(segment_id)

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """No prompt uses these segments any more: their replicas must drop them."""
        holders = set()
        with self._lock:
            for segment_id in segment_ids:
                if (holder := self._remove(segment_id)) is not None:
                    self.memories[holder].dropped.append(segment_id)
                    holders.add(holder)
        if (on_drop := self._on_drop) is not None:
            for holder in holders:
                on_drop(holder)

    def take_dropped(self, replica: str) -> list[SegmentId]:
        """The segments that a replica must drop; the caller sends them."""
        memory = self.memories[replica]
        with self._lock:
            dropped, memory.dropped = memory.dropped, []
        return dropped

    def drop_again(self, replica: str, segment_ids: Iterable[SegmentId]) -> None:
        """Sending failed: return these segments with the next `take_dropped`."""
        with self._lock:
            self.memories[replica].dropped.extend(segment_ids)

    def _remove(self, segment_id: SegmentId) -> str | None:
        """Returns the replica that held it, or None."""
        self._on_disk.discard(segment_id)
        return next((name for name, memory in self.memories.items() if memory.remove(segment_id)), None)
