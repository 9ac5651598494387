"""From a plan to its ticket, and from what a connector tells back to a sequence that can become a node."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import Copy, NodeDraft, NodeId, SegmentId, Span, gaps, token_ids
from kvshare.fleet.report_draft import BadReportError, draft_of
from kvshare.fleet.routed_request import Incoming, Routed, RoutedRequest
from kvshare.fleet.tickets import ticket_for
from kvshare.namespace import Owner
from kvshare.requests import Prompt
from kvshare.sharing.plan import NoPlan, Plan, RepairOrder
from kvshare.sharing.rates import Estimate
from kvshare.vllm_protocol.messages import FinishedReport, StoredSegment, Ticket, WireSpan, digest_of
from kvshare.vllm_protocol.salts import owner_salt, private_salt
from vector_index import PromptText

PROMPT = token_ids(np.arange(100, dtype=np.int32))
OWNER = Owner("acme", "tenant")


def plan_of(*copies: tuple[int, int, int], exact_length: int = 0) -> Plan:
    """Copies (target start, length, shift), each of a segment of its own."""
    planned = tuple(
        Copy(NodeId(number), SegmentId(number), 0, length, start, start - shift, start - shift)
        for number, (start, length, shift) in enumerate(copies, start=1)
    )
    return Plan(
        num_tokens=100,
        exact_length=exact_length,
        copies=planned,
        placeholders=gaps((copy.target for copy in planned), 100),
        repairs=(),
        generation=1,
        estimate=Estimate(1.0, 0.5),
    )


PLAN = plan_of((0, 20, 0), (30, 30, 5), (70, 20, 5), exact_length=20)


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


def test_a_ticket_says_what_the_plan_says() -> None:
    """Copies with their sources, the exact prefix, and whose prompt it is."""
    ticket = ticket_for(PLAN, PROMPT, ticket_id="r", namespace="n", store=True)
    assert [copy.target for copy in ticket.copies] == [Span(0, 20), Span(30, 60), Span(70, 90)]
    assert [copy.shift for copy in ticket.copies] == [0, 5, 5]
    assert (ticket.exact_length, ticket.num_tokens) == (20, 100)
    assert ticket.prompt_digest == digest_of(PROMPT)
    assert Ticket.from_json(ticket.to_json()) == ticket
    assert ticket_for(NoPlan(), PROMPT, ticket_id="r", namespace="n", store=False).copies == ()


def test_approximate_tickets_have_a_salt_of_their_own() -> None:
    """Everything else has its owner's; a client's salt divides it, and none meets another's."""
    approximate = ticket_for(PLAN, PROMPT, ticket_id="r", namespace="n", store=True)
    exact = ticket_for(plan_of((0, 20, 0), exact_length=20), PROMPT, ticket_id="r", namespace="n", store=True)
    divided, whole = Incoming(OWNER.divided("mine")), Incoming(OWNER)
    assert RoutedRequest(divided, Routed(ticket=approximate)).salt == private_salt("r")
    assert RoutedRequest(whole, Routed(ticket=exact)).salt == RoutedRequest(whole).salt == owner_salt(OWNER)
    salts = [
        owner_salt(OWNER),
        owner_salt(OWNER.divided("a")),
        owner_salt(OWNER.divided(owner_salt(OWNER))),
        owner_salt(OWNER.divided("a").divided("b")),
        owner_salt(OWNER.divided("b").divided("a")),
        owner_salt(replace(OWNER, salt="a")),
        owner_salt(Owner("globex", "tenant")),
        owner_salt(Owner("acme", "private")),
        owner_salt(Owner("acmetenant", "")),
        owner_salt(OWNER.divided("\ud800")),
    ]
    assert len(set(salts)) == len(salts)
    assert all(len(salt) == 64 for salt in salts)


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


ORDERED = replace(
    PLAN, order=RepairOrder(stretches=(Span(30, 60), Span(70, 84)), probes=(30, 32, 70), num_tokens=6)
)


def test_an_order_travels_with_the_ticket() -> None:
    """The connector provides all but the last 16 tokens, and never less than the copies."""
    ticket = ticket_for(ORDERED, PROMPT, ticket_id="r", namespace="n", store=True)
    assert ticket.order is not None
    assert [entry.span for entry in ticket.order.stretches] == [Span(30, 60), Span(70, 84)]
    assert (ticket.order.probes, ticket.order.num_tokens, ticket.order.end) == ((30, 32, 70), 6, 90)
    assert Ticket.from_json(ticket.to_json()) == ticket
    assert ticket_for(PLAN, PROMPT, ticket_id="r", namespace="n", store=True).order is None


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
