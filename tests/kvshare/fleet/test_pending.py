"""Tickets that are out: who is waited for, and who is forgotten."""

from __future__ import annotations

import asyncio

import numpy as np

from delta_tree import token_ids
from kvshare.fleet.pending import Pending, PendingTickets
from kvshare.namespace import Owner
from kvshare.sharing.plan import NoPlan
from kvshare.vllm_protocol.messages import Ticket
from vector_index import PromptText

OWNER = Owner("acme", "tenant")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pending(request_id: str = "r", *, replica: str = "a") -> Pending:
    return Pending(
        ticket=Ticket(request_id, "n", "d", 10),
        replica=replica,
        owner=OWNER,
        prompt=token_ids(np.arange(10, dtype=np.int32)),
        text=PromptText("", ""),
        plan=NoPlan("x"),
        was_alone=True,
    )


def test_only_the_replica_that_has_a_ticket_may_end_it() -> None:
    """News of it from elsewhere is news of an unknown ticket."""
    tickets, entry = PendingTickets(expiry_s=60), pending()
    tickets.add(entry)
    assert tickets.take("r", "b") is None
    assert tickets.take("r", "a") is entry
    assert tickets.take("r", "a") is None


def test_a_ticket_expires_after_its_answer_only() -> None:
    """An answer may take hours; what comes after it may not."""
    clock = Clock()
    tickets, entry = PendingTickets(expiry_s=60, clock=clock), pending()
    tickets.add(entry)
    clock.now = 1000.0
    assert tickets.expire() == 0
    tickets.end(entry, was_refused=False)
    clock.now = 1059.0
    assert tickets.expire() == 0
    clock.now = 1060.0
    assert tickets.expire() == 1
    assert len(tickets) == 0


def test_refused_requests_and_lost_replicas_are_not_waited_for() -> None:
    """Nothing will be heard of them."""
    tickets, refused, lost = PendingTickets(expiry_s=60), pending("x"), pending("y")
    tickets.add(refused)
    tickets.add(lost)
    tickets.end(refused, was_refused=True)
    tickets.forget_replica("a")
    assert len(tickets) == 0
    assert refused.is_settled.is_set()
    assert lost.is_settled.is_set()


async def test_the_next_request_waits_for_news_of_the_last() -> None:
    """For its owner's only, while it is fresh, and not for long."""
    clock = Clock()
    tickets, entry = PendingTickets(expiry_s=60, clock=clock), pending()
    tickets.add(entry)
    await asyncio.wait_for(tickets.caught_up(OWNER, timeout_s=5), 1)  # it still runs
    tickets.end(entry, was_refused=False)
    await asyncio.wait_for(tickets.caught_up(Owner("globex", "tenant"), timeout_s=5), 1)
    waiting = asyncio.create_task(tickets.caught_up(OWNER, timeout_s=5))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert tickets.take("r", "a") is entry
    await asyncio.sleep(0.01)
    assert not waiting.done()  # told, but not to be found yet
    tickets.settle(entry)
    await asyncio.wait_for(waiting, 1)


async def test_nobody_waits_for_news_that_does_not_come() -> None:
    """After a moment the next request goes on without."""
    clock = Clock()
    tickets, entry = PendingTickets(expiry_s=60, clock=clock), pending()
    tickets.add(entry)
    tickets.end(entry, was_refused=False)
    clock.now = 6.0
    await asyncio.wait_for(tickets.caught_up(OWNER, timeout_s=5), 1)
