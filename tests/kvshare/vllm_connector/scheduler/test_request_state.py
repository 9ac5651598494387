"""The states of a request, and which copies stand in its slots, whatever vLLM does with it. No model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.scheduler import request_state
from kvshare.vllm_connector.scheduler.request_state import (
    TABLE,
    TRANSITIONS,
    Event,
    State,
    TicketedRequest,
)
from kvshare.vllm_protocol.messages import Ticket, WireCopy
from tests.kvshare.vllm_connector.scheduler.ticketed_requests import (
    admit,
    end,
    new_request,
    reachable,
    result,
)

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import LoadResult

ROOT = Path(request_state.__file__).parents[3]


class TestTable:
    """The states that a request goes through."""

    def reach(self, state: State) -> TicketedRequest:
        """A request in a state."""
        request = new_request()
        if state is State.WAITING:
            return request
        admit(request, num_local=0, joins=state in (State.JOINED, State.CLOSING))
        if state is State.CLOSING:
            request.close()
        if state in (State.RUNNING, State.SAVING):
            request.note_load(result())
        if state is State.SAVING:
            end(request, retains=True)
        elif state in (State.ENDING, State.DONE):
            end(request, retains=False)
        if state is State.DONE:
            request.note_load(result())
        assert request.state is state
        return request

    def cause(self, request: TicketedRequest, event: Event) -> None:
        """What makes an event happen."""
        if event is Event.LOOKED_UP:
            request.look_up(0)
        elif event in (Event.ADMITTED, Event.LOAD_REQUESTED, Event.LOAD_JOINED):
            request.joins = event is Event.LOAD_JOINED
            request.admit((0, 1), loads=event is not Event.ADMITTED)
        elif event is Event.CLOSED:
            request.close()
        elif event is Event.LOAD_REPORTED:
            request.note_load(result())
        elif event is Event.SAVED:
            request.note_saved(lost=None)
        elif request.state is State.SAVING or (request.state, event) == (State.LOADING, Event.SAVE_REQUESTED):
            request._advance(event)  # what is retained would forbid it first
        else:
            end(request, retains=event is Event.SAVE_REQUESTED)

    @pytest.mark.parametrize("state", State)
    @pytest.mark.parametrize("event", Event)
    def test_every_event_in_every_state(self, state: State, event: Event) -> None:
        """It leads where the table says. What the table does not have is a bug of ours."""
        request = self.reach(state)
        following = TRANSITIONS.get((state, event))
        if following is None:
            with pytest.raises(AssertionError, match=f"{state} cannot be {event}"):
                self.cause(request, event)
        else:
            self.cause(request, event)
        assert request.state is (following or state)

    def test_it_is_read_as_it_is_drawn(self) -> None:
        """Every event has a row, `done` is the end, and docs/architecture.md has the same drawing."""
        assert {event for _, event in TRANSITIONS} == set(Event)
        assert len(TRANSITIONS) == 20
        assert TRANSITIONS[State.RUNNING, Event.SAVE_REQUESTED] is State.SAVING
        assert TRANSITIONS[State.ENDING, Event.LOAD_REPORTED] is State.DONE
        assert not any(state is State.DONE for state, _ in TRANSITIONS)
        assert TABLE in (ROOT / "docs" / "architecture.md").read_text()

    def test_every_request_can_be_done(self) -> None:
        """From every state `done` can be reached, and every state can be reached."""
        assert reachable(TRANSITIONS, State.WAITING) == set(State)
        assert all(State.DONE in reachable(TRANSITIONS, state) for state in State)


class TestSlots:
    """Which copies stand in the slots, and when that can no longer be said."""

    @pytest.mark.parametrize(
        ("num_local", "held", "placed", "is_mixed"),
        [
            (300, (), {0, 1}, False),  # both lie before: as they were
            (120, (0, 1), {0, 1}, False),  # behind: loaded again
            (120, (0,), {0}, False),  # behind: not loaded, and computed
            (128, (0, 1), {0, 1}, False),  # across: loaded as before
            (128, (0,), {0}, True),  # across: its first slots are the segment's, the others computed
            (50, (1,), {1}, True),
        ],
    )
    def test_a_resumed_request(
        self,
        running: TicketedRequest,
        num_local: int,
        held: tuple[int, ...],
        placed: set[int],
        is_mixed: bool,
    ) -> None:
        """After a preemption it finds the start of its own blocks in the prefix cache."""
        admit(running, num_local=num_local, held=held, loads=num_local < 300)
        assert (set(running.placed), running.is_mixed) == (placed, is_mixed)

    def test_a_copy_that_was_computed_and_is_loaded_now(self) -> None:
        """Its first slots were computed, the others are the segment's."""
        request = new_request()
        admit(request, num_local=0, held=(0,))
        request.note_load(result())
        admit(request, num_local=128, held=(0, 1))
        assert (set(request.placed), request.is_mixed) == ({0, 1}, True)

    def test_exact_kv_does_not_mix(self) -> None:
        """It is the same wherever it came from."""
        copies = (WireCopy(SegmentId(1), 0, 100, 0, 0), WireCopy(SegmentId(2), 0, 180, 120, 120))
        request = TicketedRequest(Ticket("t", "ns", "d", 400, 300, copies), None, is_first=True)
        admit(request, num_local=64)
        request.note_load(result())
        admit(request, num_local=128, held=(0,))
        assert (set(request.placed), request.is_mixed) == ({0}, False)

    def test_a_siblings_blocks_mix(self) -> None:
        """A new approximate request finds blocks under its salt: those of another choice of its ticket."""
        request = new_request()
        admit(request, num_local=64)
        assert request.is_mixed
        assert not request.may_retain

    @pytest.mark.parametrize("failed", [True, False])
    def test_a_copy_across_that_cannot_be_read_mixes(self, running: TicketedRequest, failed: bool) -> None:
        """The worker finds it: its first slots were placed at an earlier admission."""
        admit(running, num_local=128)
        running.note_load(result(failed, (2,)))
        assert (set(running.placed), running.is_mixed) == ({0}, True)

    @pytest.mark.parametrize("failed", [True, False])
    def test_a_copy_behind_that_cannot_be_read_does_not(self, running: TicketedRequest, failed: bool) -> None:
        """All of it was computed."""
        admit(running, num_local=110)
        running.note_load(result(failed, (2,)))
        assert (set(running.placed), running.is_mixed) == ({0}, False)
        assert running.may_load is not failed

    def test_a_look_that_admits_nothing_changes_nothing(self) -> None:
        """vLLM looks a request up in every step in which it finds no room for it."""
        request = new_request()
        request.look_up(128)
        admit(request, num_local=0)
        request.note_load(result(failed=True))
        assert (request.num_first_local, request.placed) == (0, frozenset())


class TestRepairs:
    """What was computed again of the placed copies is known with the load's report."""

    def reported(self, *spans: Span) -> LoadResult:
        return replace(result(), repaired=spans)

    def test_they_are_no_reused_tokens(self) -> None:
        request = new_request()
        admit(request, num_local=0)
        request.note_load(self.reported(Span(10, 30), Span(120, 130)))
        end(request, retains=False)
        assert request.finished().num_computed == 400 - (100 + 180) + 30

    def test_a_later_admission_knows_nothing_of_them(self) -> None:
        """Preempted, its copies gone, and computed in full: nothing was reused and nothing repaired."""
        request = new_request()
        admit(request, num_local=0)
        request.note_load(self.reported(Span(10, 30)))
        admit(request, num_local=0, held=(), loads=False)
        assert request.repaired == ()
        end(request, retains=False)
        assert request.finished().decision == "full"
        assert request.finished().num_computed == 400
