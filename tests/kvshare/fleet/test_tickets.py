"""From a plan to the ticket that carries it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_tree import Span
from kvshare.fleet.tickets import ticket_for, wire_order
from kvshare.sharing.plan import NoPlan, RepairOrder
from kvshare.vllm_protocol.messages import Ticket, digest_of
from tests.kvshare.fleet.plans import ORDERED, PLAN, PROMPT, plan_of


def test_a_ticket_says_what_the_plan_says() -> None:
    """Copies with their sources, the exact prefix, and whose prompt it is."""
    ticket = ticket_for(PLAN, PROMPT, ticket_id="r", namespace="n", store=True)
    assert [copy.target for copy in ticket.copies] == [Span(0, 20), Span(30, 60), Span(70, 90)]
    assert [copy.shift for copy in ticket.copies] == [0, 5, 5]
    assert (ticket.exact_length, ticket.num_tokens) == (20, 100)
    assert ticket.prompt_digest == digest_of(PROMPT)
    assert Ticket.from_json(ticket.to_json()) == ticket
    assert ticket_for(NoPlan(), PROMPT, ticket_id="r", namespace="n", store=False).copies == ()


def test_an_order_travels_with_the_ticket() -> None:
    """The connector provides all but the last 16 tokens, and never less than the copies."""
    ticket = ticket_for(ORDERED, PROMPT, ticket_id="r", namespace="n", store=True)
    assert ticket.order is not None
    assert [entry.span for entry in ticket.order.stretches] == [Span(30, 60), Span(70, 84)]
    assert (ticket.order.probes, ticket.order.num_tokens, ticket.order.end) == ((30, 32, 70), 6, 90)
    assert Ticket.from_json(ticket.to_json()) == ticket
    assert ticket_for(PLAN, PROMPT, ticket_id="r", namespace="n", store=True).order is None


@pytest.mark.parametrize("store", [True, False])
def test_without_a_plan_a_ticket_may_still_ask_for_its_prompt(store: bool) -> None:
    """Whose it is and which prompt; nothing about a disk, whatever the plan would have said."""
    ticket = ticket_for(NoPlan(), PROMPT, ticket_id="r", namespace="n", store=store, disk_s=3.0)
    assert (ticket.ticket_id, ticket.namespace, ticket.store) == ("r", "n", store)
    assert (ticket.copies, ticket.order, ticket.exact_length, ticket.disk_s) == ((), None, 0, 0.0)
    assert ticket.prompt_digest == digest_of(PROMPT)


def test_a_plan_says_how_long_its_disk_may_take() -> None:
    ticket = ticket_for(PLAN, PROMPT, ticket_id="r", namespace="n", store=True, disk_s=0.25)
    assert Ticket.from_json(ticket.to_json()).disk_s == 0.25


@pytest.mark.parametrize(("length", "end"), [(20, 84), (25, 84), (28, 84), (29, 85), (39, 95)])
def test_vllm_computes_the_last_tokens_that_are_not_copied(length: int, end: int) -> None:
    """Sixteen of them, or fewer, where a copy reaches further."""
    plan = replace(
        plan_of((0, 20, 0), (56, length, 5), exact_length=20),
        order=RepairOrder(stretches=(Span(56, 60),), probes=(56,), num_tokens=1),
    )
    order = wire_order(plan)
    assert order is not None
    assert order.end == end
    ticket = ticket_for(plan, PROMPT, ticket_id="r", namespace="n", store=True)
    assert Ticket.from_json(ticket.to_json()).order == order
