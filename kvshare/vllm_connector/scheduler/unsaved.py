"""
Segments that lie in vLLM's blocks only: they can be copied from at once, and are saved to host memory later.

    unsaved   it lies in blocks of its request, which may have ended: vLLM may give them away
    saving    a copy to host memory is under way, from blocks that vLLM may give away meanwhile
    saved     the copy is complete, and the blocks still had the segment then: host memory has it
    lost      the blocks were given away before that: the segment is dropped

No save keeps a block from being given away. What is saved depends on who waits:

    no request waits          the oldest ones, a few at a time; those of a request that runs all together
    requests wait for loads   only what others copy from, once its blocks are about to be given away
    requests wait for blocks  nothing

Everything runs on the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.metadata import SaveRequest, WorkerReport
from kvshare.vllm_connector.scheduler.block_donors import BlockDonors
from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
from kvshare.vllm_connector.scheduler.drops import Drops
from kvshare.vllm_connector.scheduler.waiting import Waiting
from kvshare.vllm_protocol.messages import WireCopy

_UNDER_WAY = 8  # an eighth of the pool's blocks is saved at a time
_LEAVING = 4  # the quarter of the pool's blocks that vLLM gives away next counts as about to leave


class UnsavedSegments:
    """One per scheduler."""

    def __init__(self, drops: Drops, donors: BlockDonors, waiting: Waiting, disk: DiskPlan) -> None:
        self._drops, self._donors, self._waiting, self._disk = drops, donors, waiting, disk
        self._ids: dict[SegmentId, int] = {}  # the oldest first, with the number of blocks
        self._used: set[SegmentId] = set()  # others copy from them, or are about to
        self._at_once: set[SegmentId] = set()  # of them those that are saved next, however many
        self._saving: dict[str, SegmentId] = {}  # by the name of the save

    def __len__(self) -> int:
        return len(self._ids)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._ids

    @property
    def are_due(self) -> bool:
        """Return whether vLLM should take steps even without requests, so that saves go on."""
        return bool(self._ids) and not self._waiting.is_any

    def add(self, segment_ids: Iterable[SegmentId], *, runs: bool) -> None:
        """
        Add segments whose places are noted, and all of whose tokens lie in full blocks.

        `runs`: their request does, so that they are likely to be read before their blocks are given away.
        """
        for segment_id in segment_ids:
            self._ids[segment_id] = len(self._donors.block_ids(segment_id))
            if runs and not self._waiting.is_any:
                self._at_once.add(segment_id)

    def forget(self, segment_ids: Iterable[SegmentId]) -> None:
        """Forget segments, because they are dropped or saved."""
        for segment_id in segment_ids:
            self._ids.pop(segment_id, None)
            self._used.discard(segment_id)
            self._at_once.discard(segment_id)

    def is_readable(self, copy: WireCopy) -> bool:
        """Return whether a copy can be read: its segment is not unsaved, or blocks have its tokens."""
        span = Span(copy.offset, copy.offset + copy.length)
        return copy.segment_id not in self._ids or self._donors.has(copy.segment_id, span)

    def note_use(self, segment_ids: Iterable[SegmentId]) -> None:
        """Note that a request is about to copy from segments."""
        self._used.update(segment_id for segment_id in segment_ids if segment_id in self._ids)

    def note_left(self, segment_ids: Iterable[SegmentId]) -> None:
        """Drop unsaved segments whose blocks were given away."""
        self._drops.drop([segment_id for segment_id in segment_ids if segment_id in self._ids])

    def take_due(self) -> Iterator[SaveRequest]:
        """Yield the saves to request in this step, besides those that are under way."""
        if not self._ids:
            return
        room = self._donors.num_in_pool // _UNDER_WAY
        room -= sum(self._ids.get(segment_id, 0) for segment_id in self._saving.values())
        for segment_id in sorted(self._worth_saving(), key=lambda each: each not in self._at_once):
            room -= self._ids[segment_id]
            if room < 0 and self._saving and segment_id not in self._at_once:
                return
            if (place := self._donors.whole(segment_id)) is None:
                self.note_left([segment_id])
                continue
            block_ids, span = place
            name = f"kvshare-segment-{segment_id}"
            self._saving[name] = segment_id
            yield SaveRequest(name, block_ids, ((segment_id, span),), has_ended=False)

    def note_saved(self, report: WorkerReport) -> None:
        """Note saves that have ended. What was read is right if the blocks still have the segment."""
        for name in report.saved_prompts & self._saving.keys():
            segment_id = self._saving.pop(name)
            if segment_id not in self._ids:
                continue  # dropped meanwhile
            if name in report.failed_saves or self._donors.whole(segment_id) is None:
                self._drops.drop([segment_id])
            else:
                self._disk.note_saved([segment_id])
            self.forget([segment_id])

    def _worth_saving(self) -> Sequence[SegmentId]:
        saving = set(self._saving.values())
        waiting = [segment_id for segment_id in self._ids if segment_id not in saving]
        if not self._waiting.is_any:
            return waiting
        used = [segment_id for segment_id in waiting if segment_id in self._used]
        if not used or self._waiting.is_any_for_blocks:
            return ()
        leaving = self._donors.next_given_away(self._donors.num_in_pool // _LEAVING)
        return [each for each in used if not leaving.isdisjoint(self._donors.block_ids(each))]
