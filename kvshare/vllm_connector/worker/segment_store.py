"""
The segments of one worker: K and V of this rank's heads, in host memory, each with its checksum.

The scheduler side decides what is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

from delta_tree import SegmentId
from kvshare.kv.segment import SegmentKV


class SegmentStore:
    """Used by the worker's thread only."""

    def __init__(self) -> None:
        self._segments: dict[SegmentId, tuple[SegmentKV, int]] = {}

    def put(self, segment_id: SegmentId, segment: SegmentKV) -> None:
        """Raises ValueError for an id that is taken: ids are never reused."""
        if segment_id in self._segments:
            raise ValueError(f"segment {segment_id} is already stored")
        self._segments[segment_id] = (segment, segment.checksum())

    def get(self, segment_id: SegmentId) -> SegmentKV | None:
        """The segment; None if it is not here, or its bytes are no longer those that were put."""
        entry = self._segments.get(segment_id)
        if entry is None or entry[0].checksum() != entry[1]:
            return None
        return entry[0]

    def clear(self) -> None:
        self._segments.clear()

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Ids that are not here are ignored."""
        for segment_id in segment_ids:
            self._segments.pop(segment_id, None)
