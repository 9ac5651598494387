"""
The state of one request with a ticket, and which copies its slots hold. `retention.py` has another state:
what is retained of the request, and when that is saved.

While a load is under way, vLLM keeps the request's blocks, does not run it and does not preempt it. vLLM
looks up a request that has no blocks, and may admit it in a later step, or never. A request whose load joins
a step may run in that step (`joined`). Until that step is reported it may be preempted, but is not looked up,
and if it ends (`closing`), its blocks stay. A request that is `done` is reported to the proxy and forgotten.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import numpy as np

from delta_tree import SegmentId, Span, TokenIds, merge
from kvshare.reasons import Reason
from kvshare.vllm_connector.scheduler.retention import RequestRetention, RetentionState
from kvshare.vllm_connector.scheduler.transitions import transitions
from kvshare.vllm_protocol.messages import (
    FinishedReport,
    Prefilled,
    Ticket,
    WireCopy,
    WireSpan,
)

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import LoadResult


State = StrEnum("State", "WAITING RUNNING LOADING JOINED CLOSING ENDING SAVING DONE")
Event = StrEnum(
    "Event", "LOOKED_UP ADMITTED LOAD_REQUESTED LOAD_JOINED LOAD_REPORTED CLOSED ENDED SAVE_REQUESTED SAVED"
)

# The next state, by event (rows) and state (columns); `-` would be a bug of ours.
TABLE = """
                waiting  running  loading  joined  closing  ending  saving
looked_up       waiting  waiting  -        -       -        -       -       vLLM asks: it has no blocks
admitted        running  running  -        -       -        -       -       it has blocks; nothing is loaded
load_requested  loading  loading  -        -       -        -       -       the same; copies are to be loaded
load_joined     joined   joined   joined   -       -        -       -       in the step that is planned
load_reported   -        -        running  running running  done    -       what its slots hold is reported
closed          -        -        -        closing -        -       -       ended before that; it has blocks
ended           done     done     ending   -       -        -       -       nothing more is saved
save_requested  saving   saving   -        -       -        -       -       it has ended; it has blocks
saved           -        -        -        -       -        -       done    retained, unless drops came
"""


TRANSITIONS = transitions(TABLE, State, Event)

# With these reasons the plan is not carried out, but the prompt is computed in full and may be retained.
_RETAINABLE = (None, Reason.NOT_PRIVATE, Reason.ROTATION_UNKNOWN)


@dataclass(slots=True)
class TicketedRequest:
    """Each method that changes the state is an event of the table; AssertionError if that forbids it."""

    ticket: Ticket
    unshared: Reason | None  # why its plan is not carried out
    is_first: bool  # the first of the n choices with this ticket; only that is retained and reported
    token_ids: TokenIds = field(default_factory=lambda: np.empty(0, np.int32), repr=False)  # of its prompt
    media: tuple[Span, ...] = ()  # of its prompt
    state: State = State.WAITING
    num_found: int = 0  # prompt tokens in vLLM's own prefix cache at its last lookup
    joins: bool = False  # decided at its last lookup: its load joins a step
    num_local: int = 0  # `num_found` at the last admission
    num_first_local: int | None = None  # `num_found` at the first admission; None before it
    placed: frozenset[int] = frozenset()  # copies whose KV is in the slots
    is_mixed: bool = False  # some slots of a copy hold other KV than the segment's: nothing is retained
    load_failed: bool = False  # vLLM computes everything from here on
    repaired: tuple[Span, ...] = ()  # tokens of placed copies that were computed again
    num_prompt: int = 0  # known at the end
    retention: RequestRetention = field(default_factory=RequestRetention)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    num_from_blocks: int = 0  # tokens of its load that are not copied from host memory
    disk_bytes: int = 0  # of its load, read from disk before
    late_bytes: int = 0  # that were not
    was_late: bool = False  # that
    num_answer_steps: int = 0  # after the first token, where vLLM decodes speculatively
    num_answer_tokens: int = 0  # that they gave
    first_token_s: float | None = None  # since it got blocks; None if it was preempted meanwhile

    @property
    def was_admitted(self) -> bool:
        return self.num_first_local is not None

    @property
    def may_load(self) -> bool:
        return self.unshared is None and not self.load_failed

    @property
    def may_retain(self) -> bool:
        return self.is_first and self.ticket.store and not self.is_mixed and self.unshared in _RETAINABLE

    @property
    def may_save_prompt(self) -> bool:
        """Return whether to save its prompt now: once, while it runs, with its slots' content known."""
        return self.may_retain and (self.state, self.retention.state) == (
            State.RUNNING,
            RetentionState.NONE,
        )

    @property
    def is_as_saved(self) -> bool:
        """Return whether the slots still hold the prompt that is saved, so that the answer can be added."""
        retention = self.retention
        if retention.lost is not None or not self.may_retain or not retention.is_requested:
            return False
        if self.ticket.is_exact:
            return True
        return self.repaired == retention.repaired and retention.copies <= self.placed

    def copy(self, index: int) -> WireCopy:
        return self.ticket.copies[index]

    def look_up(self, num_found: int) -> None:
        """Note a lookup: vLLM found `num_found` tokens in its own prefix cache, and has no blocks for it."""
        self._advance(Event.LOOKED_UP)
        self.num_found, self.joins = num_found, False

    def admit(self, held: Collection[int], *, loads: bool) -> None:
        """
        Note that vLLM allocated its blocks. Up to `num_local` they come from vLLM's prefix cache; after that
        the `held` copies are written, if it `loads`.

            position of a copy    whether it is placed now
            before num_local      if it was before: these are the request's blocks from before a preemption
            after num_local       if it is loaded now
            across num_local      if it is loaded now; if that differs from before, its slots are mixed
        """
        requested = Event.LOAD_JOINED if self.joins else Event.LOAD_REQUESTED
        self._advance(requested if loads else Event.ADMITTED)
        self.num_local = self.num_found
        if self.num_first_local is None:
            self.num_first_local = self.num_local
            if self.num_local:
                self._note_mixed()  # blocks of another choice of the same request, which has the same salt
        if self.num_local and self.ticket.order is not None:
            self._note_mixed()  # they hold repairs that were chosen at an earlier admission
        placed = set()
        for index, copy in enumerate(self.ticket.copies):
            before, now = index in self.placed, loads and index in held
            if copy.target.end <= self.num_local:
                now = before
            elif copy.target_start < self.num_local and before != now:
                self._note_mixed()
            if now:
                placed.add(index)
        self.placed = frozenset(placed)
        self.repaired = ()

    def note_load(self, result: LoadResult) -> None:
        """Note the end of a load. Lost copies were computed; one across `num_local` leaves mixed slots."""
        self._advance(Event.LOAD_REPORTED)
        self.load_failed = self.load_failed or result.failed
        loaded = (index for index in self.placed if self.copy(index).target.end > self.num_local)
        gone, self.was_late = result.unreadable, bool(result.late)
        lost = {index for index in loaded if result.failed or self.copy(index).segment_id in gone}
        if any(self.copy(index).target_start < self.num_local for index in lost):
            self._note_mixed()
        self.placed -= lost
        targets = [self.copy(index).target for index in self.placed]
        parts = (span.intersection(target) for span in result.repaired for target in targets)
        self.repaired = merge(part for part in parts if part)
        retention = self.retention
        if retention.is_requested and not self._is_whole(retention.copies, result.unreadable):
            retention.lost = Reason.LOAD_FAILED if result.failed else Reason.SEGMENTS_GONE

    def note_times(self, stage_seconds: Mapping[str, float]) -> None:
        for stage, seconds in stage_seconds.items():
            self.stage_seconds[stage] = self.stage_seconds.get(stage, 0.0) + seconds

    def note_prompt_saved(self) -> Prefilled:
        """Note that the prompt is saved, and return the event for the proxy."""
        self.retention.note_prompt_saved()
        return Prefilled(
            self.ticket.ticket_id,
            used=tuple(sorted(self.retention.copies)),
            stored=self.retention.prompt,
            repaired=_wire(self.retention.repaired),
        )

    def join(self) -> None:
        """Note that its load joins the step being planned: vLLM may run it there."""
        self._advance(Event.LOAD_JOINED)

    def close(self) -> None:
        """Note its end before its load was reported. After that report it is decided what is saved."""
        self._advance(Event.CLOSED)

    def end(self, *, num_prompt: int) -> None:
        """Note its end, after its saves were requested. They are lost if it ends during its load."""
        if self.state is State.LOADING and self.retention.is_requested:
            self.retention.lost = self.retention.lost or Reason.ABORTED
        self._advance(Event.SAVE_REQUESTED if self.retention.has_pending_end else Event.ENDED)
        self.num_prompt = num_prompt

    def note_saved(self, *, lost: Reason | None, keeps_prompt: bool = False) -> None:
        """The save has ended; `lost` says why not all is retained, `keeps_prompt` whether its prompt is."""
        self._advance(Event.SAVED)
        self.retention.note_saved(lost=lost, keeps_prompt=keeps_prompt)

    def finished(self) -> FinishedReport:
        """Return the event for the proxy."""
        num_local = self.num_first_local or 0
        targets = (self.copy(index).target for index in self.placed)
        num_placed = sum(max(0, target.end - max(target.start, num_local)) for target in targets)
        num_placed -= sum(len(span) for span in self.repaired)
        decision: Literal["approx", "exact", "full"] = "exact" if num_local + num_placed else "full"
        if self.placed and not self.ticket.is_exact:
            decision = "approx"
        finished = FinishedReport(
            ticket_id=self.ticket.ticket_id,
            decision=decision,
            reason=self.retention.lost or self._reason(),
            num_computed=max(0, self.num_prompt - num_local - num_placed),
            num_local=num_local,
            num_from_blocks=self.num_from_blocks,
            disk_bytes=self.disk_bytes,
            late_bytes=self.late_bytes,
            stage_seconds=dict(self.stage_seconds),
            first_token_s=self.first_token_s,
            num_answer_steps=self.num_answer_steps,
            num_answer_tokens=self.num_answer_tokens,
        )
        retention = self.retention
        used, repaired = tuple(sorted(retention.copies)), _wire(retention.repaired)
        if retention.state is RetentionState.RETAINED:
            stored, output_ids = retention.stored, retention.output_ids
            return replace(finished, used=used, stored=stored, repaired=repaired, output_ids=output_ids)
        if retention.state is RetentionState.DONOR:
            return replace(finished, used=used, stored=retention.prompt, repaired=repaired)
        return finished

    def _advance(self, event: Event) -> None:
        following = TRANSITIONS.get((self.state, event))
        assert following is not None, f"a request that is {self.state} cannot be {event}"
        self.state = following

    def _note_mixed(self) -> None:
        """Note mixed slots; not if the plan is exact, because exact KV is the same wherever it came from."""
        self.is_mixed = self.is_mixed or not self.ticket.is_exact

    def _is_whole(self, copies: Collection[int], unreadable: Collection[SegmentId]) -> bool:
        """Return whether the copies that a retained prompt refers to are readable, and still in its slots."""
        if any(self.copy(index).segment_id in unreadable for index in copies):
            return False
        return self.ticket.is_exact or self.placed.issuperset(copies)

    def _reason(self) -> Reason | None:
        """Return why less was shared than planned, or None."""
        if self.unshared is not None:
            return self.unshared
        if self.load_failed:
            return Reason.LOAD_FAILED
        if self.was_late:
            return Reason.KV_LATE
        if not self.ticket.is_exact and len(self.placed) < len(self.ticket.copies):
            return Reason.SEGMENTS_GONE
        return None


def _wire(spans: Collection[Span]) -> tuple[WireSpan, ...]:
    return tuple(WireSpan(span.start, span.end) for span in spans)
