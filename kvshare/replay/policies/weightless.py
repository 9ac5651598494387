"""KV that has a size and no bytes, for replays; and memory for it."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from delta_tree import Segment, SegmentId, Span
from kvshare.kv.tier import Fetched, SegmentTable
from kvshare.status import TierStatus

UNLIMITED = 2**62  # bytes


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
    """Counts the bytes that segments would take."""

    def put(self, segment: Segment, kv: WeightlessKV) -> None:
        self.add(segment.segment_id, kv)

    def close(self) -> None:
        """There is nothing to write."""

    def status(self) -> tuple[TierStatus, ...]:
        """A replay counts hits itself."""
        return ()

    def fetch(
        self, segment_ids: Iterable[SegmentId], *, within_s: float = math.inf, doubt_s: float = math.inf
    ) -> Fetched:
        """No bytes, only which segments are missing."""
        return Fetched({}, frozenset(entry for entry in segment_ids if entry not in self))
