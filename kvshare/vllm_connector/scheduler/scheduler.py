"""
The connector inside vLLM's scheduler: it turns tickets into load and save requests, and reports into events.

Everything runs on the scheduler's thread, except `drop`, which the control server may call at any time. A
request whose ticket cannot be used is served unshared.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from delta_tree import SegmentId, Span, gaps, merge, new_segment_id, segment_tokens, split
from kvshare.reasons import Reason
from kvshare.sharing.plan import MAX_TAIL_TOKENS, RepairOrder, cut
from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest, StepMetadata, WorkerReport
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.request_state import State, TicketedRequest, why_unshared
from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex
from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.messages import TICKET_KEY, Dropped, StoredSegment, Ticket, budget_of

log = logging.getLogger("vllm.kvshare")

_MAX_SEEN_TICKETS = 4096


@dataclass(eq=False, kw_only=True)
class ConnectorScheduler:
    """One per scheduler, with vLLM's method names. Keys are vLLM's request ids; events carry ticket ids."""

    segments: SegmentIndex
    events: EventLog
    shares: bool = False  # no ticket is taken before this and the next two are set
    bytes_per_token: int = 0
    may_move_keys: bool = False

    def __post_init__(self) -> None:
        self._requests: dict[str, TicketedRequest] = {}  # until they are `done`
        self._seen: OrderedDict[str, None] = OrderedDict()  # a request with n > 1 sends its ticket n times
        self._loads: list[LoadRequest] = []
        self._saves: list[SaveRequest] = []
        self._cancelled: list[str] = []  # loads of aborted requests
        self._drops: list[SegmentId] = []
        self._drops_lock = threading.Lock()

    def on_new_request(self, request: Request) -> None:
        """Take a request's ticket, if it has one."""
        document = (request.kv_transfer_params or {}).get(TICKET_KEY)
        if document is None or not self.shares:
            return
        try:
            ticket = Ticket.from_json(document)
        except WireError as exc:
            log.warning("request %s: its ticket cannot be read: %s", request.request_id, exc)
            return
        unshared = why_unshared(request, ticket, may_move_keys=self.may_move_keys)
        is_first = ticket.ticket_id not in self._seen
        self._seen[ticket.ticket_id] = None
        if len(self._seen) > _MAX_SEEN_TICKETS:
            self._seen.popitem(last=False)
        self._requests[request.request_id] = TicketedRequest(ticket, unshared, is_first)

    def get_num_new_matched_tokens(self, request: Request, num_local: int) -> int:
        """How many tokens behind the `num_local` in vLLM's prefix cache can be loaded asynchronously."""
        ticketed = self._requests.get(request.request_id)
        if ticketed is None:
            return 0
        ticketed.look_up(num_local)
        if not ticketed.may_load:
            return 0
        ticket = ticketed.ticket
        end = max((ticketed.copy(index).target.end for index in self._held(ticket)), default=0)
        order = ticket.order
        if order is not None and end > ticket.first_approximate and order.end - end <= MAX_TAIL_TOKENS:
            end = ticket.num_tokens  # the worker computes the tail, to see what it attends to
        return max(0, end - num_local)

    def update_state_after_alloc(self, request: Request, block_ids: Sequence[int], num_external: int) -> None:
        """
        vLLM allocated the request's blocks, and `num_external` tokens are to be loaded into them.

        vLLM 0.33 may call it in a later step than the lookup, with the tokens counted as computed, and may
        want fewer tokens than were offered.
        """
        ticketed = self._requests.get(request.request_id)
        if ticketed is None or (request.num_computed_tokens and not num_external):
            return  # vLLM calls this again after an asynchronous load
        end = ticketed.num_found + num_external
        held = self._held(ticketed.ticket, end=end)
        ticketed.admit(held, loads=num_external > 0)
        if not num_external:
            return
        start = ticketed.num_local
        copies = [ticketed.copy(index) for index in sorted(held)]
        self.segments.touch(copy.segment_id for copy in copies)
        order = _order(ticketed.ticket, Span(start, end))
        num_tokens = ticketed.ticket.num_tokens
        self._loads.append(
            LoadRequest(
                request_id=request.request_id,
                block_ids=tuple(block_ids),
                start=start,
                end=end,
                token_ids=tuple(request.all_token_ids[: end if order is None else num_tokens]),
                copies=tuple(copy for copy in copies if copy.target.end > start),
                order=order,
                first_approximate=ticketed.ticket.first_approximate,
            )
        )

    def build_connector_meta(self, step: SchedulerOutput) -> StepMetadata:
        """All requests since the last call; `step` is what vLLM itself has scheduled."""
        self._save_prompts(step)
        with self._drops_lock:
            drops, self._drops = tuple(self._drops), []
        loads, self._loads = tuple(self._loads), []
        saves, self._saves = self._saves, []
        cancelled, self._cancelled = tuple(self._cancelled), []
        if drops:  # a segment may be dropped before it is saved
            saves = [save.without(drops) for save in saves]
        return StepMetadata(
            loads,
            tuple(saves),
            drops,
            cancelled,
            preempted=frozenset(step.preempted_req_ids or ()),
            has_forward=step.total_num_scheduled_tokens > 0,
        )

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """The request has ended or was aborted. Returns whether its blocks must stay until they are saved."""
        ticketed = self._requests.pop(request.request_id, None)
        if ticketed is None:
            return False
        if ticketed.state is State.LOADING:
            self._cancelled.append(request.request_id)  # vLLM keeps its blocks until the load is reported
        else:
            self._retain(ticketed, request, block_ids)
        ticketed.end(num_prompt=request.num_prompt_tokens)
        self._requests[request.request_id] = ticketed
        self._publish_if_done(request.request_id, ticketed)
        return ticketed.state is State.SAVING

    def update_connector_output(self, report: WorkerReport, saved: Iterable[str]) -> None:
        """Take the workers' report of a step, and the ended requests whose KV has been saved."""
        if report.has_new_weights:
            self.reset_cache()
        for request_id, stage_seconds in report.stage_seconds.items():
            if (ticketed := self._requests.get(request_id)) is not None:
                ticketed.note_times(stage_seconds)
        self._note_dropped(self.segments.drop(report.unreadable))
        for request_id in report.saved_prompts:
            if (ticketed := self._requests.get(request_id)) is not None:
                self._note_prompt_saved(request_id, ticketed, report)
        for request_id, result in report.loads.items():
            if (ticketed := self._requests.get(request_id)) is not None:
                ticketed.note_load(result)
                self._publish_if_done(request_id, ticketed)
        for request_id in saved:
            if (ticketed := self._requests.get(request_id)) is not None:
                self._note_saved(request_id, ticketed, report)

    def drop(self, segment_ids: Iterable[SegmentId]) -> int:
        """Drop segments. Returns how many were held. Thread-safe."""
        removed = self.segments.drop(segment_ids)
        self._note_dropped(removed)
        return len(removed)

    def reset_cache(self) -> None:
        """The weights may have changed: drop all segments, and retain nothing of running requests."""
        self.drop(self.segments.ids())
        for ticketed in self._requests.values():
            ticketed.is_mixed = True

    def _retain(self, ticketed: TicketedRequest, request: Request, block_ids: Sequence[int]) -> None:
        """Request a save of an ended request, or of what is not saved of it yet."""
        num_retained = _num_retained(request, ticketed)
        output_ids = tuple(request.output_token_ids[: max(0, num_retained - request.num_prompt_tokens)])
        save = SaveRequest(request.request_id, tuple(block_ids))
        if ticketed.retained is not None:
            self._save_answer(ticketed, save, output_ids)
        elif num_retained:
            self._save(ticketed, save, output_ids)

    def _save_prompts(self, step: SchedulerOutput) -> None:
        """
        Request saves of prompts that are prefilled, one step later, so that the first token does not wait.

        By then the results of their loads are known, and their blocks stay allocated during the step.
        """
        known = {name: self._requests.get(name) for name in step.num_scheduled_tokens}
        due = {name: each for name, each in known.items() if each is not None and each.may_save_prompt}
        if not due:
            return
        assert step.kv_connector_block_state is not None
        computed = _num_computed(step)
        for request_id, ticketed in due.items():
            if computed[request_id] < ticketed.ticket.num_tokens:
                continue
            ticketed.was_saved_early = True
            block_ids = tuple(step.kv_connector_block_state.resolve_block_ids(request_id)[0])
            self._save(ticketed, SaveRequest(request_id, block_ids, has_ended=False))
            ticketed.lost = None  # even if there was no room: the prompt is saved again with the answer
            ticketed.saved_early = ticketed.stored

    def _save(self, ticketed: TicketedRequest, save: SaveRequest, output_ids: tuple[int, ...] = ()) -> None:
        """Make room for all tokens that no stored segment covers, and request their save."""
        copies = self._retained_copies(ticketed)
        if not ticketed.ticket.is_exact and not ticketed.placed <= copies:
            ticketed.lost = Reason.SEGMENTS_GONE  # copied KV must not be stored as if it had been computed
            return
        num_prompt = ticketed.ticket.num_tokens
        targets = (ticketed.copy(index).target for index in copies)
        computed = gaps(targets, num_prompt + len(output_ids))
        if ticketed.ticket.order is not None:  # all tokens of a segment have the same generation
            computed = merge([*computed, *ticketed.repaired])
            computed = cut(computed, _first_retained_approximate(ticketed, copies))
        computed = cut(computed, num_prompt)  # answers have own segments
        stored = self._add(ticketed, computed, copies)
        if stored is None:
            ticketed.lost = Reason.NO_ROOM
            return
        self._request_save(save, stored)
        ticketed.retain(copies, stored)
        ticketed.output_ids = output_ids

    def _save_answer(self, ticketed: TicketedRequest, save: SaveRequest, output_ids: tuple[int, ...]) -> None:
        """Request a save of the answer. Its prompt's save may still be under way, and needs the blocks."""
        assert ticketed.retained is not None
        answer: tuple[StoredSegment, ...] = ()
        if output_ids and ticketed.is_as_saved:
            num_prompt = ticketed.ticket.num_tokens
            behind = (Span(num_prompt, num_prompt + len(output_ids)),)
            added = self._add(ticketed, behind, ticketed.retained)
            if added is None:
                ticketed.lost = Reason.NO_ROOM  # the prompt stays retained
            else:
                answer, ticketed.output_ids = added, output_ids
                ticketed.stored += answer
        self._request_save(save, answer)

    def _request_save(self, save: SaveRequest, stored: Iterable[StoredSegment]) -> None:
        spans = tuple((segment.segment_id, segment.span) for segment in stored)
        self._saves.append(replace(save, spans=spans))

    def _add(
        self, ticketed: TicketedRequest, computed: Iterable[Span], copies: Iterable[int]
    ) -> tuple[StoredSegment, ...] | None:
        """Add segments for computed spans to the index; others are dropped for them. None if no room."""
        spans = split(computed, segment_tokens(budget_of(self.segments.max_bytes) // self.bytes_per_token))
        stored = tuple(
            StoredSegment(new_segment_id(), span.start, len(span), len(span) * self.bytes_per_token)
            for span in spans
        )
        own = [segment.segment_id for segment in ticketed.stored]
        evicted = self.segments.make_room(
            sum(segment.num_bytes for segment in stored),
            in_use=[*own, *(ticketed.copy(index).segment_id for index in copies)],
        )
        if evicted is None:
            return None
        self._note_dropped(evicted)
        for segment in stored:
            held = HeldSegment(ticketed.ticket.namespace, segment.length, segment.num_bytes)
            self.segments.add(segment.segment_id, held)
        return stored

    def _retained_copies(self, ticketed: TicketedRequest) -> frozenset[int]:
        """
        The copies that are part of the retained prompt.

        Exact KV is the same wherever it came from: a prompt that was in vLLM's own prefix cache can refer to
        the stored segments as well.
        """
        if ticketed.unshared is not None:
            return frozenset()
        held = self._held(ticketed.ticket)
        return held if ticketed.ticket.is_exact else ticketed.placed & held

    def _note_prompt_saved(self, request_id: str, ticketed: TicketedRequest, report: WorkerReport) -> None:
        if request_id in report.failed_saves or not self._are_held(ticketed, ticketed.saved_early):
            self._note_dropped(self.segments.drop(segment.segment_id for segment in ticketed.saved_early))
            ticketed.note_prompt_lost()
        else:
            self.events.append(ticketed.note_prompt_saved())

    def _note_saved(self, request_id: str, ticketed: TicketedRequest, report: WorkerReport) -> None:
        lost = Reason.SAVE_FAILED if request_id in report.failed_saves else ticketed.lost
        if lost is None and not self._are_held(ticketed, ticketed.stored):
            lost = Reason.SEGMENTS_GONE  # dropped while the rest was being saved
        ticketed.note_saved(lost=lost)
        if lost is not None:
            if ticketed.prefilled is not None and not self._are_held(ticketed, ticketed.prefilled.stored):
                ticketed.prefilled = None
            reported = ticketed.prefilled.stored if ticketed.prefilled is not None else ()
            unreported = (segment for segment in ticketed.stored if segment not in reported)
            self._note_dropped(self.segments.drop(segment.segment_id for segment in unreported))
        self._publish_if_done(request_id, ticketed)

    def _are_held(self, ticketed: TicketedRequest, stored: Iterable[StoredSegment]) -> bool:
        """Whether these segments, and those of the copies in its retained KV, are held."""
        assert ticketed.retained is not None
        return ticketed.retained <= self._held(ticketed.ticket) and all(
            segment.segment_id in self.segments for segment in stored
        )

    def _publish_if_done(self, request_id: str, ticketed: TicketedRequest) -> None:
        if ticketed.state is State.DONE:
            del self._requests[request_id]
            if ticketed.is_first:
                self.events.append(ticketed.finished())

    def _note_dropped(self, segment_ids: Sequence[SegmentId]) -> None:
        """Have the workers drop them, and the proxy informed."""
        if segment_ids:
            with self._drops_lock:
                self._drops.extend(segment_ids)
            self.events.append(Dropped(tuple(segment_ids)))

    def _held(self, ticket: Ticket, *, end: int | None = None) -> frozenset[int]:
        """Indices of a ticket's copies whose segments are held; with `end`, of those that end by then."""
        return frozenset(
            index
            for index, copy in enumerate(ticket.copies)
            if (end is None or copy.target.end <= end)
            and self.segments.covers(copy.segment_id, ticket.namespace, end=copy.offset + copy.length)
        )


def _first_retained_approximate(ticketed: TicketedRequest, copies: Iterable[int]) -> int:
    """Start of the first retained approximate copy: tokens behind it were computed over approximate KV."""
    starts = (ticketed.copy(index).target_start for index in copies)
    approximate = (start for start in starts if start >= ticketed.ticket.exact_length)
    return min(approximate, default=ticketed.ticket.num_tokens)


def _order(ticket: Ticket, provided: Span) -> RepairOrder | None:
    """The part of the ticket's repair order that lies in the loaded positions."""
    if ticket.order is None:
        return None
    parts = (stretch.span.intersection(provided) for stretch in ticket.order.stretches)
    stretches = tuple(part for part in parts if part)
    probes = tuple(place for place in ticket.order.probes if provided.start <= place < provided.end)
    return RepairOrder(stretches, probes, ticket.order.num_tokens) if stretches else None


def _num_retained(request: Request, ticketed: TicketedRequest) -> int:
    """
    Leading tokens whose KV is in the slots; 0 if nothing may be retained.

    The last sampled token is never computed. A preempted request has lost its slots, and one that was aborted
    in prefill has not filled them. One whose load has not begun has empty slots.
    """
    if ticketed.state is not State.RUNNING:
        return 0
    num_computed: int = request.num_prompt_tokens + request.num_output_tokens - 1
    is_complete = request.num_output_tokens and request.num_computed_tokens >= num_computed
    return num_computed if ticketed.may_retain and is_complete else 0


def _num_computed(step: SchedulerOutput) -> dict[str, int]:
    """How many tokens of each request of a step were computed before it."""
    cached = step.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed | {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
