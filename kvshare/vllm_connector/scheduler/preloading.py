"""
Reads from disk for requests that wait in vLLM's queue, before they have blocks.

    waits    the scheduler has passed it over: what a load of it would read from disk is read into memory, as
             far as that has room besides what only memory has
    load     waits for these reads, which may be over, as for its own
    ended    without a load: what no other request reads leaves memory, read or not
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

from delta_tree import SegmentId
from kvshare.vllm_connector.metadata import PreloadRequest, Preloads
from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
from kvshare.vllm_connector.scheduler.load_sources import LoadSources
from kvshare.vllm_connector.scheduler.request_state import TicketedRequest
from kvshare.vllm_protocol.places import OnDiskOnly

_SHARE: Final = 4  # of memory: one part for what is read for requests that wait


@dataclass(eq=False)
class Preloading:
    """One per scheduler; runs on its thread. Without a disk nothing is read."""

    disk: DiskPlan
    sources: LoadSources
    _wanted: dict[str, tuple[SegmentId, ...]] = field(default_factory=dict)  # by request that waits

    def take(self, waiting: Collection[str], requests: Mapping[str, TicketedRequest]) -> Preloads:
        """
        Return the reads to begin in this step, and which requests do not wait any more.

        `waiting`: requests that have no blocks when the step is scheduled; who came first is first
        """
        if not self.disk.is_on:
            return Preloads()
        over = tuple(each for each in self._wanted if each not in waiting)
        ended = tuple(each for each in over if self._end(each))
        begun = []
        for request_id in [each for each in waiting if each not in self._wanted]:
            far = self._on_disk(requests.get(request_id))
            wanted = self._with_room(far)
            if far and not wanted:
                break  # it is the next one, when there is room
            self._wanted[request_id] = wanted
            if wanted:
                begun.append(PreloadRequest(request_id, wanted, self.disk.shared_of(wanted)))
        return Preloads(tuple(begun), ended)

    def bytes_to_read(self, segment_ids: Collection[SegmentId]) -> int:
        """Return the bytes of those that are being read, without those that are read for waiting requests."""
        begun = frozenset[SegmentId]().union(*self._wanted.values())
        read = self.disk.segments.being_read(segment_ids)
        return self.disk.segments.bytes_of(each for each in read if each not in begun)

    def _on_disk(self, ticketed: TicketedRequest | None) -> list[SegmentId]:
        """Return what a load of this request would read from disk."""
        if ticketed is None or not ticketed.may_load:
            return []
        return self.disk.segments.only_on_disk(self.sources.from_memory(ticketed.ticket))

    def _with_room(self, far: list[SegmentId]) -> tuple[SegmentId, ...]:
        """Make room for as many of these segments as may have some, count them as in memory; return them."""
        segments, in_use = self.disk.segments, self._in_use.union(far)
        left = segments.max_bytes // _SHARE - segments.bytes_of(segments.being_read(in_use))
        ends = accumulate(segments.bytes_of([segment_id]) for segment_id in far)
        far = [segment_id for segment_id, end in zip(far, ends, strict=True) if end <= left]
        leaving = segments.make_room(segments.bytes_of(far), in_use=in_use, keeps_unwritten=True)
        if not far or leaving is None:
            return ()
        self.disk.drops.note(leaving)
        segments.begin_read(far)
        self.disk.events.append(OnDiskOnly(left=tuple(far)))
        return tuple(far)

    def _end(self, request_id: str) -> bool:
        """Release what its load does not read, if it has one. Returns whether anything was read for it."""
        wanted, segments = self._wanted.pop(request_id), self.disk.segments
        in_use = self._in_use
        unused = [each for each in segments.being_read(wanted) if each not in in_use]
        self.disk.drops.note(segments.evict(unused))
        return bool(wanted)

    @property
    def _in_use(self) -> frozenset[SegmentId]:
        """Return what loads under way and requests that wait read."""
        return self.disk.in_use.union(*self._wanted.values())
