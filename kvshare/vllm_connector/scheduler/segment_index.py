"""
An index of the segments that the workers hold. The bytes are in the workers; every rank drops the same
segments, so one index serves all ranks. Imports no vLLM.

Normally the proxy, which knows the prompts, has segments dropped before memory is full. If it does not, the
least recently used ones are dropped here: docs/decisions/0001-who-orders-evictions.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from delta_tree import SegmentId
from kvshare.kv.tier import SegmentTable
from kvshare.vllm_protocol.messages import Ticket


@dataclass(frozen=True, slots=True)
class HeldSegment:
    namespace: str
    num_tokens: int
    num_bytes: int  # over all ranks


class SegmentIndex(SegmentTable[HeldSegment]):
    """Drops the least recently used segments first. Thread-safe: the control server reads and drops, too."""

    def ids(self) -> list[SegmentId]:
        with self._lock:
            return list(self._entries)

    def covers(self, segment_id: SegmentId, namespace: str, *, end: int) -> bool:
        """Whether the segment is held, belongs to the namespace and has at least `end` tokens."""
        entry = self._entries.get(segment_id)
        return entry is not None and entry.namespace == namespace and end <= entry.num_tokens

    def held_copies(self, ticket: Ticket, *, end: int | None = None) -> frozenset[int]:
        """Indices of a ticket's copies whose segments are held; with `end`, of those that end by then."""
        return frozenset(
            index
            for index, copy in enumerate(ticket.copies)
            if (end is None or copy.target.end <= end)
            and self.covers(copy.segment_id, ticket.namespace, end=copy.offset + copy.length)
        )

    def touch(self, segment_ids: Iterable[SegmentId]) -> None:
        """Mark segments as the most recently used."""
        with self._lock:
            for segment_id in segment_ids:
                if (entry := self._entries.pop(segment_id, None)) is not None:
                    self._entries[segment_id] = entry

    def make_room(self, num_bytes: int, *, in_use: Iterable[SegmentId] = ()) -> list[SegmentId] | None:
        """
        Drop the least recently used segments until `num_bytes` fit, but none of those in `in_use`.

        Returns: the dropped segments; None if not enough can be dropped (then none is)
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
