"""From what a connector tells back of a plan to a sequence that can become a node."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import NodeDraft, SegmentId, gaps
from kvshare.fleet.report_draft import BadReportError, draft_of
from kvshare.fleet.routed_request import Incoming, Routed, RoutedRequest
from kvshare.requests import Prompt
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.vllm_protocol.messages import FinishedReport, Prefilled, StoredSegment, Ticket, WireSpan
from tests.kvshare.fleet.plans import ORDERED, OWNER, PLAN, PROMPT
from vector_index import PromptText


def told(
    *stored: tuple[int, int], used: tuple[int, ...] = (), output: tuple[int, ...] = ()
) -> FinishedReport:
    """A report of these [start, end) as segments 101, 102, ..."""
    segments = tuple(
        StoredSegment(SegmentId(number), start, end - start, 8 * (end - start))
        for number, (start, end) in enumerate(stored, start=101)
    )
    return FinishedReport("r", "approx", None, used=used, output_ids=output, stored=segments)


def retained(plan: Plan | NoPlan, finished: FinishedReport) -> NodeDraft | None:
    """What becomes of the report of a request with this plan; its donors are gone."""
    prompt = Prompt(PROMPT, PromptText("", ""))
    ticket = Ticket("r", "n", "d", len(PROMPT))
    request = RoutedRequest(Incoming(OWNER, prompt), Routed(plan, ticket))
    return draft_of(request, finished, node_of=lambda _: None)


def test_a_plan_that_was_carried_out_becomes_its_sequence() -> None:
    """With the generated tokens behind the prompt."""
    finished = told((20, 30), (60, 70), (90, 103), used=(0, 1, 2), output=(7, 8, 9))
    draft = retained(PLAN, finished)
    assert draft is not None
    assert draft.token_ids.tolist() == [*range(100), 7, 8, 9]
    assert draft.exact_length == 30
    assert [segment.generation for segment in draft.new_segments] == [0, 1, 1]
    assert [(piece.segment_id, piece.length) for piece in draft.pieces] == [
        (1, 20),
        (101, 10),
        (2, 30),
        (102, 10),
        (3, 20),
        (103, 13),
    ]


def test_copies_that_were_not_used_were_computed() -> None:
    """Without the first approximate one more is exact; without any, all is."""
    draft = retained(PLAN, told((20, 70), (90, 100), used=(0, 2)))
    assert draft is not None
    assert draft.exact_length == 70
    draft = retained(PLAN, told((0, 100)))
    assert draft is not None
    assert (draft.exact_length, draft.new_segments[0].generation) == (100, 0)


def test_a_prompt_may_be_kept_in_part() -> None:
    """What was computed before the client went away."""
    draft = retained(NoPlan(), told((0, 40)))
    assert draft is not None
    assert len(draft.token_ids) == 40


def test_nothing_kept_is_nothing() -> None:
    """Not an error: it was not to be kept, or there was no room."""
    assert retained(PLAN, told(used=(0, 1, 2))) is None


@pytest.mark.parametrize(
    "finished",
    [
        told((1, 100)),  # not from the beginning
        told((0, 40), (50, 100)),  # a hole
        told((0, 60), (50, 100)),  # an overlap
        told((0, 0), (0, 100)),  # an empty segment
        told((0, 101)),  # longer than the prompt
        told((0, 100), output=(1,)),  # an output whose KV is nowhere
        told((20, 30), (60, 70), (90, 100), used=(0, 1, 2, 2)),  # twice
        told((0, 100), used=(3,)),  # a copy there was not
        told((0, 100), used=(1,)),  # computed and copied
    ],
)
def test_a_report_that_cannot_be_true_is_refused(finished: FinishedReport) -> None:
    """Wrong KV is worse than none."""
    with pytest.raises(BadReportError):
        retained(PLAN, finished)


def test_without_a_plan_nothing_can_have_been_copied() -> None:
    """A connector that says so is wrong about the request."""
    with pytest.raises(BadReportError):
        retained(NoPlan(), told((20, 100), used=(0,)))


@settings(deadline=None)
@given(st.sets(st.integers(0, 2)), st.integers(0, 5))
def test_any_subset_of_copies_can_be_kept(used: set[int], num_output: int) -> None:
    """Whatever was gone in between: the rest was computed, and every position has its KV once."""
    order = tuple(sorted(used))
    targets = [PLAN.copies[index].target for index in order]
    spans = gaps(targets, 100 + num_output)
    finished = told(*((span.start, span.end) for span in spans), used=order, output=(5,) * num_output)
    draft = retained(PLAN, finished)
    assert draft is not None
    assert draft.pieces.num_tokens == 100 + num_output == len(draft.token_ids)


def test_what_was_repaired_is_a_segment_of_its_own() -> None:
    """The copies lose it; the first of them is approximate all the same, so nothing behind it is exact."""
    finished = replace(
        told((20, 30), (30, 36), (60, 72), (90, 100), used=(0, 1, 2)),
        repaired=(WireSpan(30, 36), WireSpan(70, 72)),
    )
    draft = retained(ORDERED, finished)
    assert draft is not None
    assert draft.exact_length == 30
    assert [segment.generation for segment in draft.new_segments] == [0, 1, 1, 1]


def test_repairs_that_leave_a_gap_are_no_report() -> None:
    finished = replace(told((20, 30), (60, 70), (90, 100), used=(0, 1, 2)), repaired=(WireSpan(30, 36),))
    with pytest.raises(BadReportError, match="expected KV from position 30"):
        retained(ORDERED, finished)


def test_a_prompt_is_a_sequence_before_its_answer_is() -> None:
    """Of what is reported when it is prefilled: no token of the answer."""
    segment = StoredSegment(SegmentId(9), 0, 100, 800)
    request = RoutedRequest(
        Incoming(OWNER, Prompt(PROMPT, PromptText("", ""))), Routed(NoPlan(), Ticket("r", "n", "d", 100))
    )
    draft = draft_of(request, Prefilled("r", (), (segment,)), node_of=lambda _: None)
    assert draft is not None
    assert draft.namespace == "n"
    assert draft.token_ids.tolist() == PROMPT.tolist()
    assert draft.parent is None


@pytest.mark.parametrize("used", [(-1,), (1, 1), (0, 3)])
def test_copies_that_are_not_in_the_plan_are_refused(used: tuple[int, ...]) -> None:
    """An index below zero would be another copy."""
    with pytest.raises(BadReportError):
        retained(PLAN, told((0, 100), used=used))


def test_the_error_says_what_to_do() -> None:
    """Versions differ, most likely."""
    with pytest.raises(BadReportError, match="Install the same kvshare there and here") as error:
        retained(NoPlan(), told((0, 100), output=(1,)))
    assert "it retained 100 tokens, expected 100 of the prompt and 1 of the answer" in str(error.value)
