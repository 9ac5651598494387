"""From where a load copies: from host memory, or from vLLM's own blocks if segments still lie there."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.metadata import BlockSource, LoadRequest
from kvshare.vllm_connector.scheduler.block_donors import BlockDonors
from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
from kvshare.vllm_connector.scheduler.segment_index import SegmentIndex
from kvshare.vllm_connector.scheduler.unsaved import UnsavedSegments
from kvshare.vllm_protocol.messages import Ticket, WireCopy


@dataclass(eq=False)
class LoadSources:
    """One per scheduler."""

    segments: SegmentIndex
    donors: BlockDonors
    unsaved: UnsavedSegments
    disk: DiskPlan

    def readable(self, ticket: Ticket, *, end: int | None = None) -> frozenset[int]:
        """Return the copies of held segments, except those whose blocks were given away before a save."""
        held = self.segments.held_copies(ticket, end=end)
        return frozenset(index for index in held if self.unsaved.is_readable(ticket.copies[index]))

    def in_blocks(
        self, ticket: Ticket, copies: Iterable[WireCopy], start: int
    ) -> Mapping[WireCopy, BlockSource]:
        """Return which copies of a load from `start` on lie in blocks now, each as a whole, and where."""
        if ticket.from_memory:
            return {}
        found = ((copy, self._in_blocks(copy, start)) for copy in copies if copy.target.end > start)
        return {copy: source for copy, source in found if source is not None}

    def bytes_of(self, copies: Iterable[WireCopy], start: int, sources: Container[WireCopy]) -> int:
        """Return the bytes that a load from `start` on reads from host memory, in whole segments."""
        return self.segments.bytes_of(
            copy.segment_id for copy in copies if copy.target.end > start and copy not in sources
        )

    def may_join(
        self, copies: Iterable[WireCopy], start: int, sources: Mapping[WireCopy, BlockSource]
    ) -> bool:
        """Return whether a load of these may join a step: not if it waits for a disk or for earlier steps."""
        if self.segments.must_be_read(copy.segment_id for copy in copies if copy.target.end > start):
            return False
        return not any(source.follows_steps for source in sources.values())

    def from_memory(self, ticket: Ticket) -> list[SegmentId]:
        """Return the held segments of which a load of all of a ticket reads something from host memory."""
        copies = (ticket.copies[index] for index in sorted(self.readable(ticket)))
        return [copy.segment_id for copy in copies if ticket.from_memory or self._in_blocks(copy, 0) is None]

    def with_room(
        self, ticket: Ticket, indices: Iterable[int], start: int, sources: Container[WireCopy]
    ) -> frozenset[int]:
        """Return which copies a load from `start` on can have. Makes room for those on disk only."""
        held = frozenset(indices)
        copies = {index: ticket.copies[index] for index in held}
        from_memory = {
            index for index, copy in copies.items() if copy.target.end > start and copy not in sources
        }
        return held - from_memory | self.disk.make_room(ticket, from_memory)

    def pinned(self, load: LoadRequest, sources: Mapping[WireCopy, BlockSource]) -> LoadRequest:
        """Pin the blocks from which a load copies, and add them to it. Its target blocks are allocated."""
        own = {copy: sources[copy] for copy in load.copies if copy in sources}
        self.donors.pin(load.request_id, own.values())
        return replace(load, sources=own)

    def _in_blocks(self, copy: WireCopy, start: int) -> BlockSource | None:
        read = _read_span(copy, Span(max(start, copy.target_start), copy.target.end))
        return self.donors.find(copy.segment_id, read)


def _read_span(copy: WireCopy, target: Span) -> Span:
    """Return which tokens of its segment a copy reads for a part of its target."""
    start = copy.offset + target.start - copy.target_start
    return Span(start, start + len(target))
