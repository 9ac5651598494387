"""KV without bytes: what stands for segments where only their sizes matter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from delta_tree import SegmentId, Span
from kvshare.kv.tier import Fetched, SegmentTable

_UNLIMITED = 2**62


@dataclass(frozen=True, slots=True)
class WeightlessKV:
    """A stretch of KV that is only counted."""

    num_bytes: int

    def checksum(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class WeightlessSequence:
    """The KV of a finished sequence: so many bytes per token."""

    bytes_per_token: int
    is_whole: bool = True

    def cut(self, span: Span) -> WeightlessKV:
        return WeightlessKV(len(span) * self.bytes_per_token)


class WeightlessTier(SegmentTable[WeightlessKV]):
    """Counts the bytes that segments would take. `max_bytes` None: no limit."""

    def __init__(self, max_bytes: int | None) -> None:
        super().__init__(_UNLIMITED if max_bytes is None else max_bytes)

    def put(self, segment_id: SegmentId, segment: WeightlessKV, checksum: int) -> None:
        self.add(segment_id, segment)

    def fetch(self, segment_ids: Iterable[SegmentId]) -> Fetched:
        """No bytes, only which segments are missing."""
        return Fetched({}, frozenset(entry for entry in segment_ids if entry not in self))
