"""
Decides what of a request is retained: which of its tokens become new segments, and when they are saved.

The prompt is saved one step after its prefill, while the request runs; the rest when it has ended. What does
not fit is not retained. `retention.py` has the states that a request goes through.

While requests wait, nothing is saved at once: tokens in full blocks are retained there (`unsaved.py`), and no
block is kept for them after the request. The same applies at its end if less than half of the pool is free,
and always to what takes long (`save_pace.py`).
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
from kvshare.vllm_connector.scheduler.block_donors import BlockDonors
from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
from kvshare.vllm_connector.scheduler.drops import Drops
from kvshare.vllm_connector.scheduler.event_log import EventLog
from kvshare.vllm_connector.scheduler.request_state import TicketedRequest
from kvshare.vllm_connector.scheduler.retained_tokens import (
    end_of_prompt,
    first_retained_approximate,
    num_computed,
    num_retained_of,
    unrepaired_copies,
)
from kvshare.vllm_connector.scheduler.save_pace import SavePace
from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex
from kvshare.vllm_connector.scheduler.unsaved import UnsavedSegments
from kvshare.vllm_connector.scheduler.waiting import Waiting
from kvshare.vllm_protocol.messages import StoredSegment, budget_of


@dataclass(eq=False)
class Saving:
    """One per scheduler. `bytes_per_token`, over all ranks, is known when the workers have reported."""

    segments: SegmentIndex
    events: EventLog
    drops: Drops
    donors: BlockDonors
    waiting: Waiting
    disk: DiskPlan
    bytes_per_token: int = 0
    _requested: list[SaveRequest] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pace = SavePace()
        self.unsaved = UnsavedSegments(self.drops, self.donors, self.waiting, self.disk)

    def _stays(self, save: SaveRequest, num_tokens: int) -> bool:
        """Return whether so many retained tokens stay in blocks for now, without keeping these for them."""
        is_in_the_way = self.waiting.is_any or (save.has_ended and self.donors.are_short)
        return (is_in_the_way or self.pace.is_long(num_tokens)) and self.donors.are_found

    @property
    def requested(self) -> tuple[SaveRequest, ...]:
        """Return the saves that the workers do not know yet."""
        return tuple(self._requested)

    def take(self, drops: Sequence[SegmentId]) -> tuple[SaveRequest, ...]:
        """Return the saves to request in this step, without segments that are dropped before that."""
        saves, self._requested = self._requested, []
        self.unsaved.forget(drops)
        self.unsaved.note_left(self.donors.take_left())
        begun = (*(save.without(drops) for save in saves), *self.unsaved.take_due())
        self.pace.begin(begun)
        return begun

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
        computed = num_computed(step)
        for request_id, ticketed in due.items():
            if computed[request_id] >= ticketed.ticket.num_tokens:
                block_ids = tuple(step.kv_connector_block_state.resolve_block_ids(request_id)[0])
                copies = unrepaired_copies(ticketed)
                held = [copy for copy in copies if copy.segment_id in self.segments]  # others may be dropped
                self.donors.note_copied(held, block_ids)
                self._save_prompt(ticketed, SaveRequest(request_id, block_ids, has_ended=False))

    def save_ended(self, ticketed: TicketedRequest, request: Request, block_ids: Sequence[int]) -> bool:
        """
        Request a save of an ended request: of all that is retained of it and not saved yet.

        Returns: whether no save must be awaited; then `note_saved` must follow
        """
        num_retained = num_retained_of(request, ticketed)
        output_ids = tuple(request.output_token_ids[: max(0, num_retained - request.num_prompt_tokens)])
        save = SaveRequest(request.request_id, tuple(block_ids))
        if ticketed.retention.is_requested:
            return self._save_answer(ticketed, save, output_ids)
        return bool(num_retained) and self._save_whole(ticketed, save, output_ids)

    def release_unless_saved(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        """Request an empty save if there is none: vLLM frees an ended request's blocks when one is over."""
        if not any(save.request_id == request_id and save.has_ended for save in self._requested):
            self._requested.append(SaveRequest(request_id, block_ids))

    def note_prompt_saved(self, request_id: str, ticketed: TicketedRequest, report: WorkerReport) -> None:
        """Note that the save of a prompt has ended. It is reported to the proxy, unless it failed."""
        stored = ticketed.retention.prompt
        if request_id in report.failed_saves or not self._are_held(ticketed, stored):
            self.drops.drop(segment.segment_id for segment in stored)
            ticketed.retention.note_prompt_lost()
        else:
            self.disk.note_saved(segment.segment_id for segment in stored)
            self.events.append(ticketed.note_prompt_saved())

    def note_saved(self, request_id: str, ticketed: TicketedRequest, report: WorkerReport) -> None:
        """Note that the last save of an ended request is over."""
        retention = ticketed.retention
        lost = Reason.SAVE_FAILED if request_id in report.failed_saves else retention.lost
        if lost is None and not self._are_held(ticketed, retention.stored):
            lost = Reason.SEGMENTS_GONE  # dropped while the rest was being saved
        if lost is None:
            rest = (segment.segment_id for segment in retention.rest)
            self.disk.note_saved(each for each in rest if each not in self.unsaved)
            ticketed.note_saved(lost=None)
            return
        keeps_prompt = retention.is_reported and self._are_held(ticketed, retention.prompt)
        ticketed.note_saved(lost=lost, keeps_prompt=keeps_prompt)
        leaving = retention.rest if keeps_prompt else retention.stored
        self.drops.drop(segment.segment_id for segment in leaving)

    def _save_prompt(self, ticketed: TicketedRequest, save: SaveRequest) -> None:
        """Request the prompt's save. If there is no room now, it is tried again with the answer."""
        made = self._segments_for(ticketed, save, ticketed.ticket.num_tokens)
        if isinstance(made, Reason):
            ticketed.retention.skip_prompt()
            return
        ticketed.retention.request_prompt(made.copies, made.stored, ticketed.repaired)
        if made.stay:
            self._leave_in_blocks(save, made.stored)
            self.events.append(ticketed.note_prompt_saved())
        else:
            self._request(save, made.stored)

    def _save_whole(self, ticketed: TicketedRequest, save: SaveRequest, output_ids: tuple[int, ...]) -> bool:
        num_prompt = ticketed.ticket.num_tokens
        made = self._segments_for(ticketed, save, num_prompt + len(output_ids))
        if isinstance(made, Reason):
            ticketed.retention.lost = made
            return False
        output_ids = output_ids[: max(0, made.end - num_prompt)]
        ticketed.retention.request_whole(made.copies, made.stored, ticketed.repaired, output_ids)
        if made.stay:
            self._leave_in_blocks(save, made.stored)
        else:
            self._request(save, made.stored)
        return made.stay

    def _save_answer(self, ticketed: TicketedRequest, save: SaveRequest, output_ids: tuple[int, ...]) -> bool:
        """Request a save of the answer. Returns whether no save must be awaited, not even the prompt's."""
        answer: tuple[StoredSegment, ...] = ()
        retention, num_prompt = ticketed.retention, ticketed.ticket.num_tokens
        stays, is_prompt_saved = self._stays(save, len(output_ids)), retention.is_reported
        if output_ids and ticketed.is_as_saved:
            start, end = end_of_prompt(ticketed), num_prompt + len(output_ids)
            end = self.donors.num_full(save.block_ids, end) if stays else end
            added = self._add(ticketed, [Span(start, end)] if end > num_prompt else [], retention.copies)
            if added is None:
                retention.lost = Reason.NO_ROOM  # the prompt stays retained
            else:
                answer = added
                for segment in retention.prompt:  # its last block may be full only now
                    self.donors.note_again(segment.segment_id, segment.span, save.block_ids)
        if stays:
            self._leave_in_blocks(save, answer)
        if not (stays and is_prompt_saved):
            self._request(save, () if stays else answer)
        retention.request_answer(answer, output_ids[: end - num_prompt] if answer else ())
        return stays and is_prompt_saved

    def _segments_for(
        self, ticketed: TicketedRequest, save: SaveRequest, num_tokens: int
    ) -> NewSegments | Reason:
        """Make segments for all of the first tokens that no stored segment covers, or say why not."""
        copies = self._retained_copies(ticketed)
        if not ticketed.ticket.is_exact and not ticketed.placed <= copies:
            return Reason.SEGMENTS_GONE  # copied KV must not be stored as if it had been computed
        targets = [ticketed.copy(index).target for index in copies]
        computed = gaps(targets, num_tokens)
        if ticketed.ticket.order is not None:  # all tokens of a segment have the same generation
            computed = merge([*computed, *ticketed.repaired])
            computed = cut(computed, first_retained_approximate(ticketed, copies))
        computed = cut(computed, ticketed.ticket.num_tokens)  # prompt and answer share no segment
        stays = self._stays(save, sum(map(len, computed)))
        in_blocks = self._in_full_blocks(save, computed, targets) if stays else None
        stored = self._add(ticketed, computed if in_blocks is None else in_blocks, copies)
        if stored is None:
            return Reason.NO_ROOM
        end = max(span.end for span in [*targets, *(each.span for each in stored)])
        return NewSegments(copies, stored, end, stay=in_blocks is not None)

    def _in_full_blocks(
        self, save: SaveRequest, computed: Sequence[Span], targets: Sequence[Span]
    ) -> Sequence[Span] | None:
        """Return the parts of computed spans in full blocks; None if there are none, or they leave a gap."""
        end = self.donors.num_full(save.block_ids, max(span.end for span in computed))
        parts = [part for span in computed if (part := Span(span.start, max(span.start, min(span.end, end))))]
        retained = [*targets, *parts]
        is_whole = sum(map(len, retained)) == max((span.end for span in retained), default=0)
        return parts if parts and is_whole else None

    def _leave_in_blocks(self, save: SaveRequest, stored: Sequence[StoredSegment]) -> None:
        self._note_places(save, stored)
        self.unsaved.add((segment.segment_id for segment in stored), runs=not save.has_ended)

    def _request(self, save: SaveRequest, stored: Sequence[StoredSegment]) -> None:
        spans = tuple((segment.segment_id, segment.span) for segment in stored)
        self._requested.append(replace(save, spans=spans))
        self._note_places(save, stored)

    def _note_places(self, save: SaveRequest, stored: Iterable[StoredSegment]) -> None:
        for segment in stored:
            self.donors.note(segment.segment_id, segment.span, save.block_ids)

    def _add(
        self, ticketed: TicketedRequest, computed: Iterable[Span], copies: Iterable[int]
    ) -> tuple[StoredSegment, ...] | None:
        """Add segments for computed spans to the index, and drop others for room. None if there is none."""
        spans = split(computed, segment_tokens(budget_of(self.segments.max_bytes) // self.bytes_per_token))
        stored = tuple(
            StoredSegment(new_segment_id(), span.start, len(span), len(span) * self.bytes_per_token)
            for span in spans
        )
        own_ids = [segment.segment_id for segment in ticketed.retention.stored]
        evicted = self.segments.make_room(
            sum(segment.num_bytes for segment in stored),
            in_use=[*own_ids, *(ticketed.copy(index).segment_id for index in copies), *self.disk.in_use],
        )
        if evicted is None:
            return None
        self.drops.note(evicted)
        for segment in stored:
            namespace, length, start = ticketed.ticket.namespace, segment.length, segment.start
            held = HeldSegment(namespace, length, segment.num_bytes, start)
            self.segments.add(segment.segment_id, held)
        return stored

    def _retained_copies(self, ticketed: TicketedRequest) -> frozenset[int]:
        """
        Return the copies that are part of the retained prompt.

        Exact KV is the same wherever it came from: a prompt that was in vLLM's own prefix cache can refer to
        the stored segments as well.
        """
        if ticketed.unshared is not None:
            return frozenset()
        held = self.segments.held_copies(ticketed.ticket)
        return held if ticketed.ticket.is_exact else ticketed.placed & held

    def _are_held(self, ticketed: TicketedRequest, stored: Iterable[StoredSegment]) -> bool:
        """Return whether these segments, and those of the copies in its retained KV, are held."""
        return ticketed.retention.copies <= self.segments.held_copies(ticketed.ticket) and all(
            segment.segment_id in self.segments for segment in stored
        )


@dataclass(frozen=True, slots=True)
class NewSegments:
    """The segments of which a retained request will consist."""

    copies: frozenset[int]  # copies of its ticket
    stored: tuple[StoredSegment, ...]  # new segments for all tokens that no copy covers
    end: int  # the end of the last copy or segment
    stay: bool  # whether the new segments stay in blocks for now
