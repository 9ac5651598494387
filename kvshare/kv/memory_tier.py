"""Segments in host memory, under a byte budget. Who leaves first is decided by the tree's users, not here."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from delta_tree import SegmentId
from kvshare.kv.segment import SegmentKV
from kvshare.kv.tier import Fetched


class MemoryTier:
    """
    A dictionary of segments that knows its size. Thread-safe; dies with the process.

    A segment that was dropped while a request still reads it stays alive until that request lets go of it:
    the tensors are reference counted by Python, only the accounting ends at once.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._segments: dict[SegmentId, tuple[SegmentKV, int]] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._segments

    def put(self, segment_id: SegmentId, segment: SegmentKV, checksum: int) -> None:
        """Keep a segment. The caller has made room; ids are never reused, so nothing is overwritten."""
        with self._lock:
            if segment_id in self._segments:
                raise ValueError(f"segment {segment_id} is already stored")
            self._segments[segment_id] = (segment, checksum)
            self._num_bytes += segment.num_bytes

    def get(self, segment_id: SegmentId, *, verify: bool = False) -> SegmentKV | None:
        """The segment, or None if it is not here or its bytes do not match their checksum."""
        entry = self._segments.get(segment_id)
        if entry is None:
            return None
        segment, checksum = entry
        if verify and segment.checksum() != checksum:
            return None
        return segment

    def fetch(self, segment_ids: Iterable[SegmentId]) -> Fetched:
        """The segments whose bytes match their checksums; the others are missing."""
        wanted = frozenset(segment_ids)
        found = {segment_id: self.get(segment_id, verify=True) for segment_id in wanted}
        segments = {segment_id: segment for segment_id, segment in found.items() if segment is not None}
        return Fetched(segments, wanted - segments.keys())

    def drop(self, segment_ids: Iterable[SegmentId]) -> int:
        """Forget segments; ids that are not here are ignored. Returns the bytes freed."""
        freed = 0
        with self._lock:
            for segment_id in segment_ids:
                if (entry := self._segments.pop(segment_id, None)) is not None:
                    freed += entry[0].num_bytes
            self._num_bytes -= freed
        return freed
