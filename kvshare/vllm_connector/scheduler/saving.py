"""
Decides what of a request is retained: which of its tokens become new segments, and when they are saved.

The prompt is saved one step after its prefill, while the request runs; the rest when it has ended. What does
not fit is not retained. `retention.py` has the states that a request goes through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from delta_tree import SegmentId, Span, gaps, merge, new_segment_id, segment_tokens, split
from kvshare.reasons import Reason
from kvshare.sharing.plan import cut
from kvshare.vllm_connector.metadata import SaveRequest, WorkerReport
from kvshare.vllm_connector.scheduler.drops import Drops
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.request_state import State, TicketedRequest
from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex
from kvshare.vllm_protocol.messages import StoredSegment, budget_of


@dataclass(eq=False)
class Saving:
    """One per scheduler. `bytes_per_token`, over all ranks, is known when the workers have reported."""

    segments: SegmentIndex
    events: EventLog
    drops: Drops
    bytes_per_token: int = 0
    _requested: list[SaveRequest] = field(default_factory=list)

    @property
    def requested(self) -> tuple[SaveRequest, ...]:
        """Those that the workers do not know yet."""
        return tuple(self._requested)

    def take(self, drops: Sequence[SegmentId]) -> tuple[SaveRequest, ...]:
        """The saves to request in this step, without segments that are dropped before they are saved."""
        saves, self._requested = self._requested, []
        return tuple(save.without(drops) for save in saves) if drops else tuple(saves)

    def save_prompts(self, requests: Mapping[str, TicketedRequest], step: SchedulerOutput) -> None:
        """
        Request saves of prompts that are prefilled, one step later, so that the first token does not wait.

        By then the results of their loads are known, and their blocks stay allocated during the step.
        """
        due = {
            request_id: ticketed
            for request_id in step.num_scheduled_tokens
            if (ticketed := requests.get(request_id)) is not None and ticketed.may_save_prompt
        }
        if not due:
            return
        assert step.kv_connector_block_state is not None
        computed = _num_computed(step)
        for request_id, ticketed in due.items():
            if computed[request_id] >= ticketed.ticket.num_tokens:
                block_ids = tuple(step.kv_connector_block_state.resolve_block_ids(request_id)[0])
                self._save_prompt(ticketed, SaveRequest(request_id, block_ids, has_ended=False))

    def save_ended(self, ticketed: TicketedRequest, request: Request, block_ids: Sequence[int]) -> None:
        """Request a save of an ended request, or of what is not saved of it yet."""
        num_retained = _num_retained(request, ticketed)
        output_ids = tuple(request.output_token_ids[: max(0, num_retained - request.num_prompt_tokens)])
        save = SaveRequest(request.request_id, tuple(block_ids))
        if ticketed.retention.is_requested:
            self._save_answer(ticketed, save, output_ids)
        elif num_retained:
            self._save_whole(ticketed, save, output_ids)

    def note_prompt_saved(self, request_id: str, ticketed: TicketedRequest, report: WorkerReport) -> None:
        """The save of a prompt has ended; it is reported to the proxy, unless it failed."""
        stored = ticketed.retention.prompt
        if request_id in report.failed_saves or not self._are_held(ticketed, stored):
            self.drops.drop(segment.segment_id for segment in stored)
            ticketed.retention.note_prompt_lost()
        else:
            self.events.append(ticketed.note_prompt_saved())

    def note_saved(self, request_id: str, ticketed: TicketedRequest, report: WorkerReport) -> None:
        """The save of an ended request has ended."""
        retention = ticketed.retention
        lost = Reason.SAVE_FAILED if request_id in report.failed_saves else retention.lost
        if lost is None and not self._are_held(ticketed, retention.stored):
            lost = Reason.SEGMENTS_GONE  # dropped while the rest was being saved
        if lost is None:
            ticketed.note_saved(lost=None)
            return
        keeps_prompt = retention.is_reported and self._are_held(ticketed, retention.prompt)
        ticketed.note_saved(lost=lost, keeps_prompt=keeps_prompt)
        leaving = retention.rest if keeps_prompt else retention.stored
        self.drops.drop(segment.segment_id for segment in leaving)

    def _save_prompt(self, ticketed: TicketedRequest, save: SaveRequest) -> None:
        """If there is no room now, the prompt is saved again with the answer."""
        made = self._segments_for(ticketed, ticketed.ticket.num_tokens)
        if isinstance(made, Reason):
            ticketed.retention.skip_prompt()
            return
        self._request(save, made.stored)
        ticketed.retention.request_prompt(made.copies, made.stored, ticketed.repaired)

    def _save_whole(self, ticketed: TicketedRequest, save: SaveRequest, output_ids: tuple[int, ...]) -> None:
        made = self._segments_for(ticketed, ticketed.ticket.num_tokens + len(output_ids))
        if isinstance(made, Reason):
            ticketed.retention.lost = made
            return
        self._request(save, made.stored)
        ticketed.retention.request_whole(made.copies, made.stored, ticketed.repaired, output_ids)

    def _save_answer(self, ticketed: TicketedRequest, save: SaveRequest, output_ids: tuple[int, ...]) -> None:
        """Request a save of the answer. Its prompt's save may still be under way, and needs the blocks."""
        answer: tuple[StoredSegment, ...] = ()
        if output_ids and ticketed.is_as_saved:
            num_prompt = ticketed.ticket.num_tokens
            after = (Span(num_prompt, num_prompt + len(output_ids)),)
            added = self._add(ticketed, after, ticketed.retention.copies)
            if added is None:
                ticketed.retention.lost = Reason.NO_ROOM  # the prompt stays retained
            else:
                answer = added
        self._request(save, answer)
        ticketed.retention.request_answer(answer, output_ids if answer else ())

    def _segments_for(self, ticketed: TicketedRequest, num_tokens: int) -> NewSegments | Reason:
        """Make room for all of the first tokens that no stored segment covers, or say why that cannot be."""
        copies = self._retained_copies(ticketed)
        if not ticketed.ticket.is_exact and not ticketed.placed <= copies:
            return Reason.SEGMENTS_GONE  # copied KV must not be stored as if it had been computed
        targets = (ticketed.copy(index).target for index in copies)
        computed = gaps(targets, num_tokens)
        if ticketed.ticket.order is not None:  # all tokens of a segment have the same generation
            computed = merge([*computed, *ticketed.repaired])
            computed = cut(computed, _first_retained_approximate(ticketed, copies))
        computed = cut(computed, ticketed.ticket.num_tokens)  # answers have own segments
        stored = self._add(ticketed, computed, copies)
        return Reason.NO_ROOM if stored is None else NewSegments(copies, stored)

    def _request(self, save: SaveRequest, stored: Iterable[StoredSegment]) -> None:
        spans = tuple((segment.segment_id, segment.span) for segment in stored)
        self._requested.append(replace(save, spans=spans))

    def _add(
        self, ticketed: TicketedRequest, computed: Iterable[Span], copies: Iterable[int]
    ) -> tuple[StoredSegment, ...] | None:
        """Add segments for computed spans to the index; others are dropped for them. None if no room."""
        spans = split(computed, segment_tokens(budget_of(self.segments.max_bytes) // self.bytes_per_token))
        stored = tuple(
            StoredSegment(new_segment_id(), span.start, len(span), len(span) * self.bytes_per_token)
            for span in spans
        )
        own_ids = [segment.segment_id for segment in ticketed.retention.stored]
        evicted = self.segments.make_room(
            sum(segment.num_bytes for segment in stored),
            in_use=[*own_ids, *(ticketed.copy(index).segment_id for index in copies)],
        )
        if evicted is None:
            return None
        self.drops.note(evicted)
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
        held = self.segments.held_copies(ticketed.ticket)
        return held if ticketed.ticket.is_exact else ticketed.placed & held

    def _are_held(self, ticketed: TicketedRequest, stored: Iterable[StoredSegment]) -> bool:
        """Whether these segments, and those of the copies in its retained KV, are held."""
        return ticketed.retention.copies <= self.segments.held_copies(ticketed.ticket) and all(
            segment.segment_id in self.segments for segment in stored
        )


@dataclass(frozen=True, slots=True)
class NewSegments:
    """What a retained request will consist of."""

    copies: frozenset[int]  # of its ticket
    stored: tuple[StoredSegment, ...]  # everything between them


def _first_retained_approximate(ticketed: TicketedRequest, copies: Iterable[int]) -> int:
    """Start of the first retained approximate copy: tokens after it were computed from approximate KV."""
    starts = (ticketed.copy(index).target_start for index in copies)
    approximate = (start for start in starts if start >= ticketed.ticket.exact_length)
    return min(approximate, default=ticketed.ticket.num_tokens)


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
