"""
What is retained of one request, and how far its saves are: the second state machine of a request.

The prompt is saved while the request runs, so that others can copy from it early. After its end the answer is
saved, or both together if the prompt was not saved before.

    none      no save was requested
    skipped   its prompt was not saved while it ran: it is saved with the answer
    prompt    the save of its prompt was requested while it runs
    donor     its prompt is saved and reported: others may copy from it
    both      it has ended: the saves of its prompt and of its answer are under way
    answer    it has ended: its prompt is reported, the save of its answer is under way
    whole     it has ended: the save of all that is retained of it is under way
    retained  all of that is saved
    lost      nothing is retained

A request that is still `none` or `skipped` when it is done retains nothing. A request that ends during a load
is forgotten when the load is reported: as a `donor`, if its prompt was saved before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from delta_tree import Span
from kvshare.reasons import Reason
from kvshare.vllm_connector.scheduler.transitions import transitions
from kvshare.vllm_protocol.messages import StoredSegment

RetentionState = StrEnum("RetentionState", "NONE SKIPPED PROMPT DONOR BOTH ANSWER WHOLE RETAINED LOST")
RetentionEvent = StrEnum(
    "RetentionEvent",
    "PROMPT_REQUESTED PROMPT_SKIPPED PROMPT_SAVED PROMPT_LOST ANSWER_REQUESTED WHOLE_REQUESTED "
    "SAVED ANSWER_LOST ALL_LOST",
)

# The next state, by event (rows) and state (columns); `-` would be a bug of ours.
RETENTION_TABLE = """
                  none     skipped  prompt   donor   both      answer    whole
prompt_requested  prompt   -        -        -       -         -         -         it runs on
prompt_skipped    skipped  -        -        -       -         -         -         no room, or copies are gone
prompt_saved      -        -        donor    -       answer    -         -         the proxy is informed
prompt_lost       -        -        skipped  -       whole     -         -         it failed, or is dropped
answer_requested  -        -        both     answer  -         -         -         it has ended
whole_requested   whole    whole    -        -       -         -         -         it has ended
saved             -        -        -        -       retained  retained  retained  all of it is retained
answer_lost       -        -        -        -       -         donor     -         its prompt stays retained
all_lost          -        -        -        -       lost      lost      lost      nothing is retained
"""

RETENTION_TRANSITIONS = transitions(RETENTION_TABLE, RetentionState, RetentionEvent)

_REQUESTED = frozenset(["prompt", "donor", "both", "answer", "whole"])


@dataclass(slots=True)
class RequestRetention:
    """Each method that changes the state is an event of the table; AssertionError if that forbids it."""

    state: RetentionState = RetentionState.NONE
    copies: frozenset[int] = frozenset()  # copies of the ticket that are part of the retained KV
    prompt: tuple[StoredSegment, ...] = ()  # new segments, saved while it ran
    rest: tuple[StoredSegment, ...] = ()  # new segments, saved after its end
    output_ids: tuple[int, ...] = ()  # generated tokens whose KV is in `rest`
    repaired: tuple[Span, ...] = ()  # tokens of the copies that had been computed again when it was saved
    lost: Reason | None = None  # why nothing is retained, or only the prompt

    @property
    def stored(self) -> tuple[StoredSegment, ...]:
        return self.prompt + self.rest

    @property
    def is_requested(self) -> bool:
        """Return whether saves were requested and none of them was given up."""
        return self.state in _REQUESTED

    @property
    def is_reported(self) -> bool:
        """Return whether the proxy knows the prompt: it stays retained even if the answer is lost."""
        return self.state in (RetentionState.DONOR, RetentionState.ANSWER)

    @property
    def has_pending_end(self) -> bool:
        """Return whether the request has ended, and its blocks must stay until a save is reported."""
        return self.state in (RetentionState.BOTH, RetentionState.ANSWER, RetentionState.WHOLE)

    def request_prompt(
        self, copies: frozenset[int], stored: tuple[StoredSegment, ...], repaired: tuple[Span, ...]
    ) -> None:
        self._advance(RetentionEvent.PROMPT_REQUESTED)
        self.copies, self.prompt, self.repaired = copies, stored, repaired

    def skip_prompt(self) -> None:
        self._advance(RetentionEvent.PROMPT_SKIPPED)

    def request_whole(
        self,
        copies: frozenset[int],
        stored: tuple[StoredSegment, ...],
        repaired: tuple[Span, ...],
        output_ids: tuple[int, ...],
    ) -> None:
        self._advance(RetentionEvent.WHOLE_REQUESTED)
        self.copies, self.rest, self.repaired, self.output_ids = copies, stored, repaired, output_ids

    def request_answer(
        self, stored: tuple[StoredSegment, ...] = (), output_ids: tuple[int, ...] = ()
    ) -> None:
        """Note the save of the answer; also one without segments, if the prompt's save needs the blocks."""
        self._advance(RetentionEvent.ANSWER_REQUESTED)
        self.rest, self.output_ids = stored, output_ids

    def note_prompt_saved(self) -> None:
        self._advance(RetentionEvent.PROMPT_SAVED)

    def note_prompt_lost(self) -> None:
        """Note that the prompt's save failed. While the request runs, it may be saved with the answer."""
        self._advance(RetentionEvent.PROMPT_LOST)
        if self.state is RetentionState.SKIPPED:
            self.copies, self.prompt = frozenset(), ()

    def note_saved(self, *, lost: Reason | None, keeps_prompt: bool) -> None:
        """The last save is over. `lost`: why not all is retained; `keeps_prompt`: whether its prompt is."""
        self.lost = lost
        if lost is None:
            self._advance(RetentionEvent.SAVED)
        else:
            self._advance(RetentionEvent.ANSWER_LOST if keeps_prompt else RetentionEvent.ALL_LOST)

    def _advance(self, event: RetentionEvent) -> None:
        following = RETENTION_TRANSITIONS.get((self.state, event))
        assert following is not None, f"KV whose retention is {self.state} cannot be {event}"
        self.state = following
