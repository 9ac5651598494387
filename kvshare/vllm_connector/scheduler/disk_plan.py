"""
What of the segments is written to disk or to a shared store, and read from there: the scheduler's side of
`worker/disk_store.py`. A shared store counts as a disk here.

    saved      host memory has it whole: it is to be written with the next step
    written    the worker reports its file: it may leave memory, and is found again after a restart
    read       a load needs what is on disk only: room is made in memory, and the worker reads it first
    late       it was not read in time, and is computed. It leaves memory again
    adopted    another vLLM has written it to the shared store (`shared_news.py`): it is as on disk, and takes
               room like what is this vLLM's own, whichever proxy it is of
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from delta_tree import Segment, SegmentId
from kvshare.vllm_connector.metadata import LoadRequest, LoadResult, WorkerReport, WriteRequest
from kvshare.vllm_connector.scheduler.drops import Drops
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.request_state import TicketedRequest
from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex
from kvshare.vllm_protocol.messages import Ticket
from kvshare.vllm_protocol.places import DiskProblem, OnDiskOnly

log = logging.getLogger("vllm.kvshare")

_LONGEST_S = 10.0  # the longest time that a load waits for the disk


@dataclass(eq=False)
class DiskPlan:
    """One per scheduler; all but `adopt` runs on its thread. Without a disk nothing is planned."""

    segments: SegmentIndex
    drops: Drops
    events: EventLog
    is_on: bool = False
    has_files: bool = False  # this vLLM has its own disk, with or without a shared store
    problem: DiskProblem = field(default_factory=DiskProblem)  # of now; any thread may read it
    shared: dict[SegmentId, Segment] = field(default_factory=dict)  # in the shared store, as announced there
    _is_given_up: bool = False
    _saved: dict[SegmentId, None] = field(default_factory=dict)  # the oldest first
    _loading: dict[str, Collection[SegmentId]] = field(default_factory=dict)  # by request
    _adopting: threading.Lock = field(default_factory=threading.Lock)  # nothing is adopted after `give_up`

    def begin(self, found: Iterable[Segment]) -> None:
        """Begin to plan for the workers' disk, which has these segments of an earlier process."""
        self.is_on = True
        for each in found:
            held = HeldSegment(each.namespace, each.num_tokens, each.num_bytes, each.first_position)
            self.segments.disk.add(each.segment_id, held)

    def adopt(self, segments: Iterable[Segment], *, is_earlier: bool = False) -> None:
        """
        These are in the shared store, and can be read from there. On any thread.

        `is_earlier`: they were written before all that is known, the newest first: nothing leaves for them.
        """
        with self._adopting:
            if not self._is_given_up:
                self._adopt(segments, is_earlier=is_earlier)

    def _adopt(self, segments: Iterable[Segment], *, is_earlier: bool) -> None:
        new = []
        for segment in segments:
            self.shared[segment.segment_id] = segment
            if segment.segment_id not in self.segments:
                new.append(segment)
        if new:
            held = {
                segment.segment_id: HeldSegment(
                    segment.namespace, segment.num_tokens, segment.num_bytes, segment.first_position
                )
                for segment in new
            }
            leaving: Collection[SegmentId] = ()
            if is_earlier:
                held = self.segments.disk.note_earlier(held)
            else:
                leaving = self.segments.disk.note_written(held, staying=self.in_use)
            num_bytes = tuple(segment.num_bytes for segment in held.values())
            self.events.append(OnDiskOnly(came=tuple(held), num_bytes=num_bytes))
            self.drops.drop(leaving)

    def note_ended(self, segments: Iterable[Segment]) -> None:
        """Note that the shared store does not have these segments any more. On any thread."""
        ended = [each.segment_id for each in segments]
        for segment_id in ended:
            self.shared.pop(segment_id, None)
        if not self.has_files:  # else it may have a file; if not, a load finds that out
            self.drops.drop(self.segments.only_on_disk(ended))
            self.segments.disk.drop(ended)

    def known_shared(self) -> list[Segment]:
        """Return the held segments that are in the shared store; forget others that are there."""
        for segment_id in [each for each in list(self.shared) if each not in self.segments]:
            self.shared.pop(segment_id, None)
        return list(self.shared.values())

    @property
    def has_work(self) -> bool:
        """True if vLLM must take steps without requests: files are to be written or deleted."""
        return self.is_on and (bool(self._saved) or bool(self.drops.pending))

    def note_saved(self, segment_ids: Iterable[SegmentId]) -> None:
        """Note that host memory has these segments as a whole, so that they are written."""
        if self.is_on and not self._is_given_up:
            self._saved.update(dict.fromkeys(segment_ids))

    def give_up(self) -> None:
        """
        The weights may be others than those of the start, which name the files: write no more of them, and
        adopt nothing. What was adopted before is in the index, for the caller to drop.
        """
        if self.is_on and not self._is_given_up:
            log.warning(
                "kvshare: the cache was reset, perhaps for other weights: KV is not written to disk until "
                "vLLM is started again"
            )
            self._note_problem(DiskProblem("its cache was reset, perhaps for other weights", is_lasting=True))
        with self._adopting:
            self._is_given_up = True
            self.shared.clear()
        self._saved.clear()

    @property
    def in_use(self) -> frozenset[SegmentId]:
        """Return the segments that loads under way read. They must stay in memory."""
        return frozenset().union(*list(self._loading.values()))

    def take_writes(self) -> tuple[WriteRequest, ...]:
        """Return the writes for the workers, without what was dropped meanwhile."""
        saved, self._saved = self._saved, {}
        entries = ((each, self.segments.in_memory(each)) for each in saved)
        return tuple(
            WriteRequest(each, entry.namespace, entry.first_position)
            for each, entry in entries
            if entry is not None
        )

    def make_room(self, ticket: Ticket, indices: Collection[int]) -> frozenset[int]:
        """
        Make room in memory for what these copies of a ticket need from disk.

        Returns: the copies that can be loaded now
        """
        wanted = {ticket.copies[index].segment_id for index in indices}
        far = self.segments.only_on_disk(ticket.copies[index].segment_id for index in sorted(indices))
        in_use = wanted | self.in_use
        without_room: set[SegmentId] = set()
        while far and (left := self.segments.make_room(self.segments.bytes_of(far), in_use=in_use)) is None:
            without_room.add(far.pop())
        if far:
            self.drops.note(left or ())
            self.segments.begin_read(far)
            self.events.append(OnDiskOnly(left=tuple(far)))
        return frozenset(index for index in indices if ticket.copies[index].segment_id not in without_room)

    def with_reads(self, load: LoadRequest, disk_s: float) -> LoadRequest:
        """Return the load with a limit for its reads from disk, if it has any."""
        self._loading[load.request_id] = load.stored_ids
        if not self.segments.must_be_read(load.stored_ids):
            return load
        return replace(
            load,
            reads_within_s=max(math.ulp(0.0), min(_LONGEST_S, disk_s or _LONGEST_S)),
            shared=self.shared_of(load.stored_ids),
        )

    def shared_of(self, segment_ids: Iterable[SegmentId]) -> tuple[Segment, ...]:
        """Return what is known of those of these segments that are in the shared store."""
        found = (self.shared.get(segment_id) for segment_id in segment_ids)
        return tuple(each for each in found if each is not None)

    def without_dropped(
        self, loads: Iterable[LoadRequest], drops: Collection[SegmentId]
    ) -> tuple[LoadRequest, ...]:
        """Return the loads of a step without shared segments that it drops, which workers must not adopt."""
        gone = frozenset(drops)
        return tuple(
            replace(load, shared=tuple(each for each in load.shared if each.segment_id not in gone))
            if load.shared and gone
            else load
            for load in loads
        )

    def note(self, report: WorkerReport) -> None:
        """Note what was written, and which loads have ended."""
        if report.disk is not None:
            self.drops.drop(self.segments.note_written(report.disk.written))
            self._note_problem(DiskProblem(report.disk.problem or ""))
        for request_id, result in report.loads.items():
            self.segments.note_read(self._loading.pop(request_id, ()))
            late = self.segments.evict(each for each in result.late if each in self.segments.disk)
            self.drops.note(late)

    def note_bytes(self, ticketed: TicketedRequest, result: LoadResult) -> None:
        """Note how much of a load's reads was late: all of them but one segment at most."""
        late = [self.segments.bytes_of([segment_id]) for segment_id in result.late]
        asked = ticketed.disk_bytes
        ticketed.disk_bytes = max(asked - sum(late), min([asked, *late]))
        ticketed.late_bytes = asked - ticketed.disk_bytes

    def _note_problem(self, problem: DiskProblem) -> None:
        """Report a change of the problem to proxies, unless the current one is lasting."""
        if problem != self.problem and not self.problem.is_lasting:
            self.problem = problem
            self.events.append(problem)
