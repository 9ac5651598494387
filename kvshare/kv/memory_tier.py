"""Segments in host memory, under a byte budget. `kvshare.sharing` decides which ones to drop."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from delta_tree import SegmentId
from kvshare.kv.segment import SegmentKV
from kvshare.kv.tier import Fetched, SegmentTable


class _Stored(NamedTuple):
    segment: SegmentKV
    checksum: int

    @property
    def num_bytes(self) -> int:
        return self.segment.num_bytes


class MemoryTier(SegmentTable[_Stored]):
    """
    Segments with their checksums, lost when the process ends.

    A segment that is dropped while a request reads it stays in memory until the request has finished with it,
    as Python counts references to its tensors. It leaves the accounting at once.
    """

    def put(self, segment_id: SegmentId, segment: SegmentKV, checksum: int) -> None:
        """Store a segment. Raises ValueError for an id that is stored already."""
        self.add(segment_id, _Stored(segment, checksum))

    def fetch(self, segment_ids: Iterable[SegmentId]) -> Fetched:
        """The segments whose bytes match their checksums; the others are missing."""
        wanted = frozenset(segment_ids)
        found = ((segment_id, self._entries.get(segment_id)) for segment_id in wanted)
        segments = {
            segment_id: entry.segment
            for segment_id, entry in found
            if entry is not None and entry.segment.checksum() == entry.checksum
        }
        return Fetched(segments, wanted - segments.keys())
