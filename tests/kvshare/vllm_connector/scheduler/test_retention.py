"""What is retained of a request, and how far its saves are. No model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from delta_tree import SegmentId, Span
from kvshare.reasons import Reason
from kvshare.vllm_connector.scheduler import retention
from kvshare.vllm_connector.scheduler.retention import (
    RETENTION_TABLE,
    RETENTION_TRANSITIONS,
    RequestRetention,
    RetentionEvent,
    RetentionState,
)
from kvshare.vllm_protocol.messages import StoredSegment
from tests.kvshare.vllm_connector.scheduler.ticketed_requests import OUTPUT, STORED, reachable

ROOT = Path(retention.__file__).parents[3]
ANSWER = (StoredSegment(SegmentId(4), 400, 2, 64),)
COPIES, REPAIRED = frozenset([0]), (Span(3, 5),)

# What makes each event happen.
CAUSES: dict[RetentionEvent, Callable[[RequestRetention], None]] = {
    RetentionEvent.PROMPT_REQUESTED: lambda it: it.request_prompt(COPIES, STORED, REPAIRED),
    RetentionEvent.PROMPT_SKIPPED: lambda it: it.skip_prompt(),
    RetentionEvent.PROMPT_SAVED: lambda it: it.note_prompt_saved(),
    RetentionEvent.PROMPT_LOST: lambda it: it.note_prompt_lost(),
    RetentionEvent.ANSWER_REQUESTED: lambda it: it.request_answer(ANSWER, OUTPUT),
    RetentionEvent.WHOLE_REQUESTED: lambda it: it.request_whole(COPIES, STORED + ANSWER, REPAIRED, OUTPUT),
    RetentionEvent.SAVED: lambda it: it.note_saved(lost=None, keeps_prompt=False),
    RetentionEvent.ANSWER_LOST: lambda it: it.note_saved(lost=Reason.SAVE_FAILED, keeps_prompt=True),
    RetentionEvent.ALL_LOST: lambda it: it.note_saved(lost=Reason.SAVE_FAILED, keeps_prompt=False),
}

# The events that lead to each state.
PATHS = {
    RetentionState.NONE: "",
    RetentionState.SKIPPED: "prompt_skipped",
    RetentionState.PROMPT: "prompt_requested",
    RetentionState.DONOR: "prompt_requested prompt_saved",
    RetentionState.BOTH: "prompt_requested answer_requested",
    RetentionState.ANSWER: "prompt_requested prompt_saved answer_requested",
    RetentionState.WHOLE: "whole_requested",
    RetentionState.RETAINED: "whole_requested saved",
    RetentionState.LOST: "whole_requested all_lost",
}


def after(events: str) -> RequestRetention:
    made = RequestRetention()
    for event in events.split():
        CAUSES[RetentionEvent(event)](made)
    return made


@pytest.mark.parametrize("state", RetentionState)
@pytest.mark.parametrize("event", RetentionEvent)
def test_every_event_in_every_state(state: RetentionState, event: RetentionEvent) -> None:
    """It leads where the table says. What the table does not have is a bug of ours."""
    found = after(PATHS[state])
    assert found.state is state
    following = RETENTION_TRANSITIONS.get((state, event))
    if following is None:
        with pytest.raises(AssertionError, match=f"{state} cannot be {event}"):
            CAUSES[event](found)
    else:
        CAUSES[event](found)
    assert found.state is (following or state)


def test_it_is_read_as_it_is_drawn() -> None:
    """Every event has a row, and docs/architecture.md has the same drawing."""
    assert {event for _, event in RETENTION_TRANSITIONS} == set(RetentionEvent)
    assert len(RETENTION_TRANSITIONS) == 17
    assert RETENTION_TRANSITIONS[RetentionState.BOTH, RetentionEvent.PROMPT_SAVED] is RetentionState.ANSWER
    assert RETENTION_TABLE in (ROOT / "docs" / "architecture.md").read_text()


def test_every_retention_can_end() -> None:
    """Every state can be reached; from all but the last two all KV may be retained, or lost."""
    last = {RetentionState.RETAINED, RetentionState.LOST}
    assert reachable(RETENTION_TRANSITIONS, RetentionState.NONE) == set(RetentionState)
    assert all(reachable(RETENTION_TRANSITIONS, state) >= last for state in set(RetentionState) - last)
    assert all(state not in last for state, _ in RETENTION_TRANSITIONS)


@pytest.mark.parametrize(
    ("events", "stored", "output_ids"),
    [
        ("prompt_requested prompt_saved answer_requested saved", STORED + ANSWER, OUTPUT),
        ("prompt_requested answer_requested prompt_saved saved", STORED + ANSWER, OUTPUT),
        ("prompt_requested answer_requested saved", STORED + ANSWER, OUTPUT),
        ("prompt_requested prompt_lost whole_requested saved", STORED + ANSWER, OUTPUT),
        ("prompt_skipped whole_requested saved", STORED + ANSWER, OUTPUT),
        ("prompt_skipped", (), ()),
        ("prompt_requested prompt_lost", (), ()),
    ],
)
def test_no_segment_is_counted_twice(
    events: str, stored: Sequence[StoredSegment], output_ids: Sequence[int]
) -> None:
    """However the saves of a prompt and of its answer went."""
    found = after(events)
    assert (found.stored, found.output_ids) == (stored, output_ids)
    assert found.copies == (COPIES if stored else frozenset())
    assert found.lost is None


@pytest.mark.parametrize("state", RetentionState)
def test_a_prompt_is_known_to_the_proxy_from_its_report_on(state: RetentionState) -> None:
    """Until then, losing the rest loses all."""
    found = after(PATHS[state])
    assert found.is_reported == (state in ("donor", "answer"))
    assert found.has_pending_end == (state in ("both", "answer", "whole"))
    assert found.is_requested == (state in ("prompt", "donor", "both", "answer", "whole"))
