"""
The connector inside vLLM's scheduler: it turns tickets into load and save requests, and reports into events.

Everything runs on the scheduler's thread, except `drop`, which the control server may call at any time. A
request whose ticket cannot be used is served unshared.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from delta_tree import SegmentId, Span
from kvshare.sharing.plan import MAX_TAIL_TOKENS, RepairOrder
from kvshare.vllm_connector.metadata import LoadRequest, StepMetadata, WorkerHandshake, WorkerReport
from kvshare.vllm_connector.scheduler.drops import Drops
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.prefill_times import PrefillTimes
from kvshare.vllm_connector.scheduler.request_state import State, TicketedRequest, why_unshared
from kvshare.vllm_connector.scheduler.saving import Saving
from kvshare.vllm_connector.scheduler.segment_index import SegmentIndex
from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.messages import TICKET_KEY, Ticket

log = logging.getLogger("vllm.kvshare")

_MAX_SEEN_TICKETS = 4096


@dataclass(eq=False, kw_only=True)
class ConnectorScheduler:
    """One per scheduler, with vLLM's method names. Keys are vLLM's request ids; events carry ticket ids."""

    segments: SegmentIndex
    events: EventLog
    shares: bool = False  # no ticket is taken before `use` and `share`
    may_move_keys: bool = False

    def __post_init__(self) -> None:
        self._requests: dict[str, TicketedRequest] = {}  # until they are `done`
        self._seen: OrderedDict[str, None] = OrderedDict()  # a request with n > 1 sends its ticket n times
        self._loads: list[LoadRequest] = []
        self._cancelled: list[str] = []  # loads of aborted requests
        self.drops = Drops(self.segments, self.events)
        self.saving = Saving(self.segments, self.events, self.drops)
        self._prefill_times = PrefillTimes()

    def use(self, workers: Sequence[WorkerHandshake]) -> None:
        """Plan with what these workers, one for each rank, can do together."""
        self.saving.bytes_per_token = sum(worker.bytes_per_token for worker in workers)
        self.may_move_keys = bool(workers) and all(worker.can_move_keys for worker in workers)

    def share(self) -> None:
        """Take tickets from now on."""
        self.shares = True

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
        token_ids = np.asarray(request.prompt_token_ids or (), dtype=np.int32)
        unshared = why_unshared(request, ticket, token_ids, may_move_keys=self.may_move_keys)
        is_first = ticket.ticket_id not in self._seen
        self._seen[ticket.ticket_id] = None
        if len(self._seen) > _MAX_SEEN_TICKETS:
            self._seen.popitem(last=False)
        self._requests[request.request_id] = TicketedRequest(ticket, unshared, is_first, token_ids)

    def get_num_new_matched_tokens(self, request: Request, num_local: int) -> int:
        """How many tokens after the `num_local` in vLLM's prefix cache can be loaded asynchronously."""
        ticketed = self._requests.get(request.request_id)
        if ticketed is None:
            return 0
        ticketed.look_up(num_local)
        if not ticketed.may_load:
            return 0
        ticket = ticketed.ticket
        end = max((ticketed.copy(index).target.end for index in self.segments.held_copies(ticket)), default=0)
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
        self._prefill_times.begin(request, ticketed)
        end = ticketed.num_found + num_external
        held = self.segments.held_copies(ticketed.ticket, end=end)
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
                token_ids=ticketed.token_ids[: end if order is None else num_tokens],
                copies=tuple(copy for copy in copies if copy.target.end > start),
                order=order,
                first_approximate=ticketed.ticket.first_approximate,
            )
        )

    def build_connector_meta(self, step: SchedulerOutput) -> StepMetadata:
        """All requests since the last call; `step` is what vLLM itself has scheduled."""
        self._prefill_times.look()
        self.saving.save_prompts(self._requests, step)
        drops = self.drops.take()
        loads, self._loads = tuple(self._loads), []
        cancelled, self._cancelled = tuple(self._cancelled), []
        return StepMetadata(
            loads,
            self.saving.take(drops),
            drops,
            cancelled,
            preempted=frozenset(step.preempted_req_ids or ()),
            has_forward=step.total_num_scheduled_tokens > 0,
        )

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> bool:
        """The request has ended or was aborted. Returns whether its blocks must stay until they are saved."""
        self._prefill_times.end(request)
        ticketed = self._requests.pop(request.request_id, None)
        if ticketed is None:
            return False
        if ticketed.state is State.LOADING:
            self._cancelled.append(request.request_id)  # vLLM keeps its blocks until the load is reported
        else:
            self.saving.save_ended(ticketed, request, block_ids)
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
        self.drops.drop(report.unreadable)
        for request_id in report.saved_prompts:
            if (ticketed := self._requests.get(request_id)) is not None:
                self.saving.note_prompt_saved(request_id, ticketed, report)
        for request_id, result in report.loads.items():
            if (ticketed := self._requests.get(request_id)) is not None:
                ticketed.note_load(result)
                self._publish_if_done(request_id, ticketed)
        for request_id in saved:
            if (ticketed := self._requests.get(request_id)) is not None:
                self.saving.note_saved(request_id, ticketed, report)
                self._publish_if_done(request_id, ticketed)

    def drop(self, segment_ids: Iterable[SegmentId]) -> int:
        """Drop segments. Returns how many were held. Thread-safe."""
        return self.drops.drop(segment_ids)

    def reset_cache(self) -> None:
        """The weights may have changed: drop all segments, and retain nothing of running requests."""
        self.drop(self.segments.ids())
        for ticketed in self._requests.values():
            ticketed.is_mixed = True

    def _publish_if_done(self, request_id: str, ticketed: TicketedRequest) -> None:
        if ticketed.state is State.DONE:
            del self._requests[request_id]
            if ticketed.is_first:
                self.events.append(ticketed.finished())


def _order(ticket: Ticket, provided: Span) -> RepairOrder | None:
    """The part of the ticket's repair order that lies in the loaded positions."""
    if ticket.order is None:
        return None
    parts = (stretch.span.intersection(provided) for stretch in ticket.order.stretches)
    stretches = tuple(part for part in parts if part)
    probes = tuple(place for place in ticket.order.probes if provided.start <= place < provided.end)
    return RepairOrder(stretches, probes, ticket.order.num_tokens) if stretches else None
