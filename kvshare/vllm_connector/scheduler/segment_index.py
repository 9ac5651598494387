"""
Which segments the workers hold, and which leave when room is needed. Bytes live in the workers; every rank
carries out the same drops, so one index is true for all. Knows no vLLM.

The proxy knows prompts, and has segments dropped before there is no room. The order here is for when it is
not there, or too slow: docs/decisions/0001-who-orders-evictions.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from delta_tree import SegmentId
from kvshare.kv.tier import SegmentTable


@dataclass(frozen=True, slots=True)
class HeldSegment:
    """A held segment."""

    namespace: str
    num_tokens: int
    num_bytes: int  # over all ranks


class SegmentIndex(SegmentTable[HeldSegment]):
    """Least recently used segments leave first. The control server reads and drops, too."""

    def ids(self) -> list[SegmentId]:
        with self._lock:
            return list(self._entries)

    def covers(self, segment_id: SegmentId, namespace: str, *, end: int) -> bool:
        """Whether the segment is held, for that very namespace, and has `end` tokens at least."""
        entry = self._entries.get(segment_id)
        return entry is not None and entry.namespace == namespace and end <= entry.num_tokens

    def touch(self, segment_ids: Iterable[SegmentId]) -> None:
        """Count a use."""
        with self._lock:
            for segment_id in segment_ids:
                if (entry := self._entries.pop(segment_id, None)) is not None:
                    self._entries[segment_id] = entry

    def make_room(self, num_bytes: int, *, in_use: Iterable[SegmentId] = ()) -> list[SegmentId] | None:
        """
        Take out the least recently used until `num_bytes` fit; those in `in_use` stay.

        Returns: what left; None, and nothing left, if even that would not be enough
        """
        staying = frozenset(in_use)
        with self._lock:
            leaving: list[SegmentId] = []
            excess = self.num_bytes + num_bytes - self.max_bytes
            for segment_id, entry in self._entries.items():
                if excess <= 0:
                    break
                if segment_id not in staying:
                    leaving.append(segment_id)
                    excess -= entry.num_bytes
            if excess > 0:
                return None
            return self.drop(leaving)
