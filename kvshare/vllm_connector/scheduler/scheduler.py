"""
The connector inside vLLM's scheduler: it turns tickets into load and save requests, and reports into events.

Everything runs on the scheduler's thread, except `drop`, which the control server may call at any time. A
request whose ticket cannot be used is served unshared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from delta_tree import SegmentId, Span
from kvshare.reasons import Reason
from kvshare.sharing.plan import MAX_TAIL_TOKENS
from kvshare.vllm_connector.metadata import (
    LoadRequest,
    LoadResult,
    StepMetadata,
    WorkerHandshake,
    WorkerReport,
)
from kvshare.vllm_connector.scheduler.block_donors import BlockDonors
from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
from kvshare.vllm_connector.scheduler.drops import Drops
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.joining import Joining
from kvshare.vllm_connector.scheduler.load_sources import LoadSources
from kvshare.vllm_connector.scheduler.loaded_parts import load_request, num_placeholders
from kvshare.vllm_connector.scheduler.media import MediaRules, end_of_copies
from kvshare.vllm_connector.scheduler.prefill_times import PrefillTimes
from kvshare.vllm_connector.scheduler.preloading import Preloading
from kvshare.vllm_connector.scheduler.renewals import Renewals
from kvshare.vllm_connector.scheduler.request_state import State, TicketedRequest
from kvshare.vllm_connector.scheduler.saving import Saving
from kvshare.vllm_connector.scheduler.segment_index import SegmentIndex
from kvshare.vllm_connector.scheduler.shared_news import SharedNews
from kvshare.vllm_connector.scheduler.ticket_reader import TicketReader, why_unshared
from kvshare.vllm_connector.scheduler.waiting import Waiting
from kvshare.vllm_protocol.stages import WRITE


@dataclass(eq=False, kw_only=True)
class ConnectorScheduler:
    """One per scheduler, with vLLM's method names. Keys are vLLM's request ids; events carry ticket ids."""

    segments: SegmentIndex
    events: EventLog
    shares: bool = False  # set after `use`: no ticket is taken before
    may_move_keys: bool = False
    media_rules: MediaRules = field(default_factory=MediaRules)

    def __post_init__(self) -> None:
        self._requests: dict[str, TicketedRequest] = {}  # until they are `done`
        self._tickets = TicketReader()
        self._loads: list[LoadRequest] = []
        self._cancelled: list[str] = []  # loads of aborted requests
        self.drops = Drops(self.segments, self.events)
        self.donors = BlockDonors()
        self._waiting = Waiting()
        self._renewals = Renewals(self.donors, self._waiting)
        self.disk = DiskPlan(self.segments, self.drops, self.events)
        self.news: SharedNews | None = None  # of a shared store
        self.saving = Saving(self.segments, self.events, self.drops, self.donors, self._waiting, self.disk)
        self.unsaved = self.saving.unsaved
        self.sources = LoadSources(self.segments, self.donors, self.unsaved, self.disk)
        self.preloading = Preloading(self.disk, self.sources)
        self.joining = Joining()
        self._closing: dict[str, tuple[Request, tuple[int, ...]]] = {}  # ended, with blocks that stay
        self.times = PrefillTimes()

    def use(self, workers: Sequence[WorkerHandshake], *, step_tokens: int = 0) -> None:
        """
        Plan for these workers, one for each rank: only what all of them can do. `step_tokens`: the most
        tokens that loads that join one step may compute.
        """
        self.joining.step_tokens = step_tokens
        self.saving.bytes_per_token = sum(worker.bytes_per_token for worker in workers)
        self.may_move_keys = bool(workers) and all(worker.can_move_keys for worker in workers)
        self.donors.can_be_copied = bool(workers) and all(worker.can_copy_blocks for worker in workers)

    def on_new_request(self, request: Request) -> None:
        """Take a request's ticket, if it has one."""
        self._waiting.arrive([request.request_id])
        read = self._tickets.read(request) if self.shares else None
        if read is None:
            return
        ticket, is_first = read
        token_ids = np.asarray(request.prompt_token_ids or (), dtype=np.int32)
        media = self.media_rules.media_of(request, token_ids)
        unshared = why_unshared(request, ticket, token_ids, may_move_keys=self.may_move_keys, media=media)
        spans = tuple(medium.span for medium in media or ())
        self._requests[request.request_id] = TicketedRequest(ticket, unshared, is_first, token_ids, spans)
        donors = {copy.segment_id for copy in ticket.copies}
        self._renewals.arrive(request.request_id, donors, num_tokens=len(token_ids))
        self.unsaved.note_use(donors)

    def get_num_new_matched_tokens(self, request: Request, num_local: int) -> tuple[int | None, bool]:
        """
        Return how many tokens after the `num_local` in vLLM's prefix cache can be loaded, and whether vLLM
        goes on with other steps meanwhile. None while it is not known what the slots hold: vLLM asks again.
        """
        ticketed = self._requests.get(request.request_id)
        if ticketed is None:
            return 0, False
        if ticketed.state is State.JOINED:
            return None, False
        ticketed.look_up(num_local)
        if not ticketed.may_load:
            return 0, False
        ticket = ticketed.ticket
        copies = [ticketed.copy(index) for index in sorted(self.sources.readable(ticket))]
        end, order = end_of_copies(copies, ticketed.media, num_local), ticket.order
        if order is not None and end > ticket.first_approximate and order.end - end <= MAX_TAIL_TOKENS:
            end = ticket.num_tokens  # the worker computes the tail, to see what it attends to
        if end <= num_local:
            return 0, False
        if order is None and end < ticket.num_tokens and not ticketed.media:  # a load that joins cannot fail
            num_computed = num_placeholders(copies, Span(num_local, end))
            in_blocks = self.sources.in_blocks(ticket, copies, num_local)
            num_bytes = self.sources.bytes_of(copies, num_local, in_blocks)
            may_join = self.sources.may_join(copies, num_local, in_blocks)
            ticketed.joins = may_join and self.joining.take(num_bytes, num_computed)
        return end - num_local, not ticketed.joins

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external: int) -> None:
        """
        Begin a load: vLLM allocated the request's blocks, and wants `num_external` tokens loaded into them.

        vLLM 0.33 may call this in a later step than the lookup, with the tokens counted as computed, and may
        want fewer tokens than were offered.
        """
        self._waiting.admit(request.request_id, loads=num_external > 0)
        ticketed = self._requests.get(request.request_id)
        if ticketed is None or (request.num_computed_tokens and not num_external):
            return  # vLLM calls this again after an asynchronous load
        self.times.begin(request, ticketed)
        ticket, start = ticketed.ticket, ticketed.num_found
        held = self.sources.readable(ticket, end=(end := start + num_external))
        if not num_external:
            ticketed.admit(held, loads=False)
            return
        in_blocks = self.sources.in_blocks(ticket, map(ticketed.copy, held), start)
        held = self.sources.with_room(ticket, held, start, in_blocks)
        ticketed.admit(held, loads=True)
        copies = [ticketed.copy(index) for index in sorted(held)]
        self.segments.touch(copy.segment_id for copy in copies)
        load = load_request(ticketed, request.request_id, block_ids, copies, end)
        load = self.sources.pinned(load, in_blocks)
        load = self.disk.with_reads(load, ticket.disk_s)
        ticketed.num_from_blocks = load.num_from_blocks
        ticketed.disk_bytes = self.preloading.bytes_to_read(load.stored_ids)
        self._loads.append(load)
        self.joining.note_load(
            request.request_id,
            self.segments.bytes_of(load.stored_ids),
            num_placeholders(copies, Span(load.start, end)),
            may_join=load.order is None and not load.reads_within_s and not load.media,
            follows_steps=load.follows_steps,
        )
        if ticketed.joins:
            self.joining.due.append(request.request_id)

    def build_connector_meta(self, step: SchedulerOutput) -> StepMetadata:
        """Return all work for the workers since the last call. `step`: what vLLM itself has scheduled."""
        self.times.look()
        self._renewals.end_step()
        self._waiting.arrive(step.preempted_req_ids or ())
        self.saving.save_prompts(self._requests, step)
        drops = self.drops.take()
        self.donors.forget(drops)
        saves = self.saving.take(drops)
        if (moved := self.donors.take_moved()) is not None:
            self.events.append(moved)
        loads, self._loads = self.disk.without_dropped(self._loads, drops), []
        cancelled, self._cancelled = tuple(self._cancelled), []
        has_forward = step.total_num_scheduled_tokens > 0
        joins = has_forward or self.donors.has_pinned  # vLLM may be waiting for the pinned blocks
        joining = self.joining.take_due(self._requests) if joins else ()
        self.donors.num_steps += 1
        self.joining.note_step(self.donors.num_steps, step.total_num_scheduled_tokens)
        return StepMetadata(
            loads,
            saves,
            drops,
            cancelled,
            preempted=frozenset(step.preempted_req_ids or ()),
            has_forward=has_forward,
            number=self.donors.num_steps,
            joining=joining,
            arriving=self.joining.take_arriving(),
            preloads=self.preloading.take(self._waiting.for_blocks, self._requests),  # which evicts
            evictions=self.drops.take_evicted(),
            writes=self.disk.take_writes(),
        )

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """Note a request that has ended or was aborted. Returns whether its blocks must stay for now."""
        self.times.end(request)
        self._waiting.end(request.request_id)
        ticketed = self._requests.get(request.request_id)
        if ticketed is None:
            return False
        if ticketed.state is State.JOINED:
            self._closing[request.request_id] = request, tuple(block_ids)
            ticketed.close()
            return True
        if ticketed.state is State.LOADING:
            self._cancelled.append(request.request_id)
            ticketed.end(num_prompt=request.num_prompt_tokens)
            return request.request_id in self.joining.due  # otherwise vLLM itself keeps blocks of loads
        self._end(ticketed, request, block_ids)
        self._publish_if_done(request.request_id, ticketed)
        return ticketed.state is State.SAVING

    def _end(self, ticketed: TicketedRequest, request: Request, block_ids: Sequence[int]) -> None:
        del self._requests[request.request_id]  # so that the request is forgotten if the save raises
        stays = self.saving.save_ended(ticketed, request, block_ids)  # no save must be awaited
        if ticketed.placed and not ticketed.ticket.is_exact:
            stored = [segment.span for segment in ticketed.retention.stored]
            self.donors.reuse_first(block_ids, stored=stored)
        ticketed.end(num_prompt=request.num_prompt_tokens)
        if stays:
            self.saving.note_saved(request.request_id, ticketed, WorkerReport())
        self._requests[request.request_id] = ticketed

    def update_connector_output(self, report: WorkerReport, saved: Collection[str]) -> frozenset[str]:
        """
        Take the workers' report of a step, and the ended requests whose KV has been saved.

        Returns:  ended requests whose blocks must stay, although their loads were announced as arrived
        """
        self.donors.unpin([*report.copied, *report.loads])
        self._waiting.note_loaded(report.loads)
        self.unsaved.note_saved(report)
        self.saving.pace.note(report)
        self.disk.note(report)
        if report.step is not None:
            self.joining.note_end(report.step)
            self.donors.note_end(report.step)
        if report.has_new_weights:
            self.reset_cache()
        for request_id, stage_seconds in report.stage_seconds.items():
            self.joining.note_copied(request_id, stage_seconds.get(WRITE, 0.0))
            if (ticketed := self._requests.get(request_id)) is not None:
                ticketed.note_times(stage_seconds)
        self.drops.drop(report.unreadable)
        for request_id in report.saved_prompts:
            if (ticketed := self._requests.get(request_id)) is not None:
                self.saving.note_prompt_saved(request_id, ticketed, report)
        for request_id, result in report.loads.items():
            self._note_load(request_id, result)
        for request_id in report.failed_saves.difference(report.saved_prompts, saved):
            if (ticketed := self._requests.get(request_id)) is not None:  # another connector still saves it
                ticketed.retention.lost = Reason.SAVE_FAILED
        for request_id in saved:
            if (ticketed := self._requests.get(request_id)) is not None:
                self.saving.note_saved(request_id, ticketed, report)
                self._publish_if_done(request_id, ticketed)
        states = {each: ticketed.state for each in report.arriving if (ticketed := self._requests.get(each))}
        self.joining.due += [each for each, state in states.items() if state is State.LOADING]
        return frozenset(each for each, state in states.items() if state is State.ENDING)

    def _note_load(self, request_id: str, result: LoadResult) -> None:
        self.joining.note_result(request_id, result)
        if (ticketed := self._requests.get(request_id)) is None:
            return
        if result.failed and ticketed.state in (State.JOINED, State.CLOSING):
            self.joining.note_failure()
        self.disk.note_bytes(ticketed, result)
        ticketed.note_load(result)
        if (closing := self._closing.pop(request_id, None)) is not None:
            request, block_ids = closing
            try:
                self._end(ticketed, request, block_ids)
            finally:
                self.saving.release_unless_saved(request_id, block_ids)
        self._publish_if_done(request_id, ticketed)

    def drop(self, segment_ids: Iterable[SegmentId]) -> int:
        """Drop segments. Returns how many were held. Thread-safe."""
        return self.drops.drop(segment_ids)

    def reset_cache(self) -> None:
        """The weights may have changed: drop all segments, and retain nothing of running requests."""
        self.disk.give_up()  # before the drop: segments adopted after it would be of the old weights
        self.drop(self.segments.ids())
        self.donors.clear()
        for ticketed in self._requests.values():
            ticketed.is_mixed = True

    def _publish_if_done(self, request_id: str, ticketed: TicketedRequest) -> None:
        if ticketed.state is State.DONE:
            del self._requests[request_id]
            if ticketed.is_first:
                self.events.append(ticketed.finished())
