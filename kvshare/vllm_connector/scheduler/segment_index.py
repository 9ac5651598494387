"""
An index of the segments that the workers hold, in memory and on disk. The bytes are in the workers; every
rank drops the same segments, so one index serves all ranks. Does not import vLLM.

Normally the proxy, which knows the prompts, orders drops before memory is full. If it does not, the least
recently used segments are dropped here: docs/decisions/0001-who-orders-evictions.md.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from delta_tree import SegmentId
from kvshare.kv.tier import SegmentTable
from kvshare.vllm_protocol.messages import Ticket


@dataclass(frozen=True, slots=True)
class HeldSegment:
    namespace: str
    num_tokens: int
    num_bytes: int  # over all ranks
    first_position: int = 0  # in the prompt that it was computed for


class SegmentIndex(SegmentTable[HeldSegment]):
    """
    Drops the least recently used segments first. Thread-safe: the control server reads and drops, too.

    The table has the segments in memory. `disk` has those whose files are whole; they may be in memory, too.
    """

    def __init__(self, max_bytes: int, *, max_disk_bytes: int = 0) -> None:
        super().__init__(max_bytes)
        self.disk = DiskIndex(max_disk_bytes)
        self._arriving: set[SegmentId] = set()  # being read from disk; they count as in memory

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._entries or segment_id in self.disk

    def ids(self) -> list[SegmentId]:
        with self._lock:
            return list(dict.fromkeys([*self._entries, *self.disk.ids()]))

    def drop(self, segment_ids: Iterable[SegmentId]) -> list[SegmentId]:
        entries = list(segment_ids)
        on_disk = self.disk.drop(entries)  # before memory, so that no segment looks as if on disk only
        return list(dict.fromkeys([*self.evict(entries), *on_disk]))

    def evict(self, segment_ids: Iterable[SegmentId]) -> list[SegmentId]:
        """Evict from memory; segments on disk are still held. Returns the ids that were in memory."""
        entries = list(segment_ids)
        self._arriving.difference_update(entries)
        return super().drop(entries)

    def only_on_disk(self, segment_ids: Iterable[SegmentId] | None = None) -> list[SegmentId]:
        """Return those of these segments (default: all) that are on disk only."""
        segment_ids = self.disk.ids() if segment_ids is None else segment_ids
        return [
            each for each in dict.fromkeys(segment_ids) if each not in self._entries and each in self.disk
        ]

    def must_be_read(self, segment_ids: Iterable[SegmentId]) -> bool:
        """Return whether a load of these waits for the disk."""
        return any(
            each in self._arriving or (each not in self._entries and each in self.disk)
            for each in segment_ids
        )

    def being_read(self, segment_ids: Iterable[SegmentId]) -> list[SegmentId]:
        """Return those of these segments that are being read from disk."""
        return [segment_id for segment_id in segment_ids if segment_id in self._arriving]

    def begin_read(self, segment_ids: Iterable[SegmentId]) -> None:
        """Count segments as in memory from now on, because reads begin. The caller has made room."""
        for segment_id in segment_ids:
            if (entry := self.disk.find(segment_id)) is not None:
                self.add(segment_id, entry)
                self._arriving.add(segment_id)

    def note_read(self, segment_ids: Iterable[SegmentId]) -> None:
        """Note that a load that read these segments has ended."""
        self._arriving.difference_update(segment_ids)

    def note_written(self, segment_ids: Iterable[SegmentId]) -> list[SegmentId]:
        """Note that files of segments are whole. Returns segments for which the disk has no room any more."""
        with self._lock:
            entries = {each: entry for each in segment_ids if (entry := self._entries.get(each)) is not None}
        return self.disk.note_written(entries, staying=self._arriving)

    def in_memory(self, segment_id: SegmentId) -> HeldSegment | None:
        """Return a segment that is in memory and not on disk; else None."""
        return None if segment_id in self.disk else self._entries.get(segment_id)

    def _find(self, segment_id: SegmentId) -> HeldSegment | None:
        return self._entries.get(segment_id) or self.disk.find(segment_id)

    def covers(self, segment_id: SegmentId, namespace: str, *, end: int) -> bool:
        """Return whether the segment is held, belongs to the namespace and has at least `end` tokens."""
        entry = self._find(segment_id)
        return entry is not None and entry.namespace == namespace and end <= entry.num_tokens

    def held_copies(self, ticket: Ticket, *, end: int | None = None) -> frozenset[int]:
        """Return the indices of a ticket's copies whose segments are held; only copies that end by `end`."""
        return frozenset(
            index
            for index, copy in enumerate(ticket.copies)
            if (end is None or copy.target.end <= end)
            and self.covers(copy.segment_id, ticket.namespace, end=copy.offset + copy.length)
        )

    def bytes_of(self, segment_ids: Iterable[SegmentId]) -> int:
        """Return the bytes of those of these segments that are held, over all ranks."""
        held = (self._find(segment_id) for segment_id in frozenset(segment_ids))
        return sum(entry.num_bytes for entry in held if entry is not None)

    def touch(self, segment_ids: Iterable[SegmentId]) -> None:
        """Mark segments as the most recently used."""
        with self._lock:
            for segment_id in segment_ids:
                if (entry := self._entries.pop(segment_id, None)) is not None:
                    self._entries[segment_id] = entry
                self.disk.touch(segment_id)

    def make_room(
        self, num_bytes: int, *, in_use: Iterable[SegmentId] = (), keeps_unwritten: bool = False
    ) -> list[SegmentId] | None:
        """
        Evict segments from memory until `num_bytes` fit: first those that are also on disk, then others, each
        time the least recently used ones; none of those `in_use`. `keeps_unwritten`: no others.

        Returns: the evicted segments; None if that would not be enough, then none is evicted
        """
        staying = frozenset([*in_use, *self._arriving])
        with self._lock:
            leaving: list[SegmentId] = []
            excess = self.num_bytes + num_bytes - self.max_bytes
            on_disk = [each for each in self._entries if each in self.disk] if excess > 0 else []
            others = () if keeps_unwritten else self._entries
            for segment_id in dict.fromkeys([*on_disk, *others]):
                if excess <= 0:
                    break
                if segment_id not in staying:
                    leaving.append(segment_id)
                    excess -= self._entries[segment_id].num_bytes
            if excess > 0:
                return None
            return self.evict(leaving)


class DiskIndex(SegmentTable[HeldSegment]):
    """Segments whose files are whole, the least recently used first."""

    def ids(self) -> list[SegmentId]:
        with self._lock:
            return list(self._entries)

    def find(self, segment_id: SegmentId) -> HeldSegment | None:
        return self._entries.get(segment_id)

    def touch(self, segment_id: SegmentId) -> None:
        """Mark a segment as the most recently used."""
        with self._lock:
            if (entry := self._entries.pop(segment_id, None)) is not None:
                self._entries[segment_id] = entry

    def note_earlier(self, entries: Mapping[SegmentId, HeldSegment]) -> dict[SegmentId, HeldSegment]:
        """
        Add segments that were used before all that are held, the last used first. Nothing leaves for them.

        Returns: the segments that were new and for which there was room, the least recently used first
        """
        with self._lock:
            taken: dict[SegmentId, HeldSegment] = {}
            for segment_id, entry in entries.items():
                if self.num_bytes + entry.num_bytes > self.max_bytes:
                    break
                if segment_id not in self._entries:
                    taken[segment_id] = entry
                    self.num_bytes += entry.num_bytes
            earlier = dict(reversed(taken.items()))
            self._entries = earlier | self._entries
            return earlier

    def note_written(
        self, entries: Mapping[SegmentId, HeldSegment], *, staying: Container[SegmentId] = ()
    ) -> list[SegmentId]:
        """Add segments. Returns the least recently used ones that must leave for them; none of `staying`."""
        with self._lock:
            for segment_id, entry in entries.items():
                if segment_id not in self._entries:
                    self.add(segment_id, entry)
            leaving, excess = [], self.num_bytes - self.max_bytes
            for segment_id, entry in self._entries.items():
                if excess > 0 and segment_id not in staying:
                    leaving.append(segment_id)
                    excess -= entry.num_bytes
            return leaving
