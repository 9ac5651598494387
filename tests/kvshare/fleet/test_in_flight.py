"""Requests in flight: which are waited for, and which are forgotten."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from delta_tree import token_ids
from kvshare.fleet.in_flight import InFlight
from kvshare.fleet.routed_request import Execution, Incoming, Routed, RoutedRequest
from kvshare.namespace import Owner
from kvshare.requests import Prompt
from kvshare.sharing.arrivals import Arrivals
from kvshare.vllm_protocol.messages import Ticket
from tests.kvshare.fleet.plans import PLAN
from vector_index import PromptText

OWNER = Owner("acme", "tenant")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def sent(ticket_id: str = "r", *, replica: str = "a", num_tokens: int = 10) -> RoutedRequest:
    prompt = Prompt(token_ids(np.arange(num_tokens)), PromptText("", ""))
    ticket = Ticket(ticket_id, "n", "d", num_tokens)
    return RoutedRequest(Incoming(OWNER, prompt), Routed(ticket=ticket), execution=Execution(replica))


def test_only_the_replica_that_has_a_ticket_may_end_it() -> None:
    """News of it from elsewhere is news of an unknown ticket."""
    in_flight, entry = InFlight(Arrivals(min_run=16), expiry_s=60), sent()
    in_flight.add(entry)
    assert in_flight.take("r", "b") is None
    assert in_flight.take("r", "a") is entry
    assert in_flight.take("r", "a") is None


def test_a_ticket_expires_after_its_answer_only() -> None:
    """An answer may take hours; what comes after it may not."""
    clock = Clock()
    in_flight, entry = InFlight(Arrivals(min_run=16), expiry_s=60, clock=clock), sent()
    in_flight.add(entry)
    clock.now = 1000.0
    assert in_flight.expire() == 0
    in_flight.end(entry)
    clock.now = 1059.0
    assert in_flight.expire() == 0
    clock.now = 1060.0
    assert in_flight.expire() == 1
    assert len(in_flight) == 0


def test_refused_requests_and_lost_replicas_are_not_waited_for() -> None:
    """Nothing will be heard of them."""
    in_flight, refused, lost = InFlight(Arrivals(min_run=16), expiry_s=60), sent("x"), sent("y")
    in_flight.add(refused)
    in_flight.add(lost)
    refused.progress.has_failed = True
    in_flight.end(refused)
    in_flight.forget_replica("a")
    assert len(in_flight) == 0
    assert refused.progress.reconciled.is_set()
    assert lost.progress.reconciled.is_set()


NEXT_TURN = token_ids(np.arange(40))  # begins with the prompt of `sent`


async def test_the_next_turn_waits_for_the_report_of_the_last() -> None:
    """Only where it belongs to the owner, while the answer has just ended, and until the tree has it."""
    clock = Clock()
    in_flight, entry = InFlight(Arrivals(min_run=16), expiry_s=60, clock=clock), sent()
    in_flight.add(entry)
    await asyncio.wait_for(in_flight.wait_reconciled(OWNER, NEXT_TURN, timeout_s=600), 60)  # it still runs
    in_flight.end(entry)
    for other in (Owner("globex", "tenant"), OWNER.divided("a")):
        await asyncio.wait_for(in_flight.wait_reconciled(other, NEXT_TURN, timeout_s=600), 60)
    waiting = asyncio.create_task(in_flight.wait_reconciled(OWNER, NEXT_TURN, timeout_s=600))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    assert in_flight.take("r", "a") is entry
    await asyncio.sleep(0.01)
    assert not waiting.done()  # reported, but not in the tree yet
    in_flight.forget(entry)
    await asyncio.wait_for(waiting, 60)


@pytest.mark.parametrize(
    "prompt",
    [np.arange(50), np.arange(30), np.arange(1, 81), np.concatenate([np.arange(30), np.arange(90)])],
    ids=["the same again", "shorter", "edited at its start", "edited before the answer"],
)
async def test_other_prompts_do_not_wait(prompt: npt.NDArray[np.int64]) -> None:
    """Neither repetitions nor similar or unrelated prompts need the text of the answer that just ended."""
    in_flight, entry = InFlight(Arrivals(min_run=16), expiry_s=60), sent(num_tokens=50)
    in_flight.add(entry)
    in_flight.end(entry)
    await asyncio.wait_for(in_flight.wait_reconciled(OWNER, token_ids(prompt), timeout_s=600), 60)


async def test_a_next_turn_may_have_another_header_before_the_answer() -> None:
    """Templates may write the last tokens of an answered prompt differently."""
    in_flight, entry = InFlight(Arrivals(min_run=16), expiry_s=60), sent(num_tokens=50)
    in_flight.add(entry)
    in_flight.end(entry)
    tokens = token_ids(np.concatenate([np.arange(46), np.arange(100, 120)]))
    waiting = asyncio.create_task(in_flight.wait_reconciled(OWNER, tokens, timeout_s=600))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    in_flight.forget(entry)
    await asyncio.wait_for(waiting, 60)


async def test_a_report_that_does_not_come_is_not_waited_for_long() -> None:
    """After a moment the next turn is planned without it."""
    clock = Clock()
    in_flight, entry = InFlight(Arrivals(min_run=16), expiry_s=60, clock=clock), sent()
    in_flight.add(entry)
    in_flight.end(entry)
    clock.now = 601.0
    await asyncio.wait_for(in_flight.wait_reconciled(OWNER, NEXT_TURN, timeout_s=600), 60)


def test_its_length_is_that_of_those_without_a_report() -> None:
    """A request without a ticket is not expected to have one."""
    in_flight = InFlight(Arrivals(min_run=16), expiry_s=60)
    relayed = RoutedRequest(Incoming(OWNER))
    for entry in (sent("a"), sent("b"), relayed):
        in_flight.add(entry)
    assert len(in_flight) == 2
    assert in_flight.take("a", "a") is not None
    assert len(in_flight) == 1
    in_flight.end(relayed)
    assert relayed.progress.reconciled.is_set()


def test_a_report_before_the_answers_end_is_not_taken_for_a_failure() -> None:
    """The journal may be faster than the last byte; then the client breaks the connection."""
    in_flight, entry = InFlight(Arrivals(min_run=16), expiry_s=60), sent()
    in_flight.add(entry)
    assert in_flight.take("r", "a") is entry
    entry.progress.has_failed = True
    in_flight.end(entry)
    assert not entry.progress.reconciled.is_set()  # what it stored is still being written
    in_flight.forget(entry)
    assert entry.progress.reconciled.is_set()


def test_only_the_first_end_counts() -> None:
    """A request that was sent to two replicas ends twice; it expires by the first."""
    clock = Clock()
    in_flight, entry = InFlight(Arrivals(min_run=16), expiry_s=60, clock=clock), sent()
    in_flight.add(entry)
    in_flight.end(entry)
    clock.now = 50.0
    in_flight.end(entry)
    clock.now = 60.0
    assert in_flight.expire() == 1


def test_a_lost_replica_takes_only_its_own_requests_and_none_that_is_reported() -> None:
    """What is reported is being stored, and forgotten by who stores it."""
    in_flight = InFlight(Arrivals(min_run=16), expiry_s=60)
    lost, other, reported = sent("x"), sent("y", replica="b"), sent("z")
    for entry in (lost, other, reported):
        in_flight.add(entry)
    in_flight.take("z", "a")
    in_flight.forget_replica("a")
    assert [entry.progress.reconciled.is_set() for entry in (lost, other, reported)] == [True, False, False]


def test_donors_of_tickets_in_flight_are_held() -> None:
    """Until their request is forgotten: their KV is being copied."""
    in_flight = InFlight(Arrivals(min_run=16), expiry_s=60)
    entry, unplanned = sent("x"), sent("y")
    entry.routed = replace(entry.routed, plan=PLAN)
    for each in (entry, unplanned):
        in_flight.add(each)
    assert in_flight.donors() == set(PLAN.donors) == {1, 2, 3}
    in_flight.forget(entry)
    assert in_flight.donors() == frozenset()


def test_who_waits_for_a_prompt_is_woken_when_it_will_not_be_stored() -> None:
    """The client left before the first token; after it, the report decides."""
    arrivals = Arrivals(min_run=16)
    in_flight, entry = InFlight(arrivals, expiry_s=60), sent()
    entry.routed = replace(entry.routed, arrival=arrivals.begin("n", token_ids(np.arange(10))))
    assert entry.routed.arrival is not None
    in_flight.add(entry)
    entry.note_prefilled()
    in_flight.end(entry)
    assert not entry.routed.arrival.over.is_set()
    in_flight.end_arrival(entry, stored=True)
    assert (entry.routed.arrival.is_stored, len(arrivals)) == (True, 0)
    early = sent("s")
    early.routed = replace(early.routed, arrival=arrivals.begin("n", token_ids(np.arange(10))))
    in_flight.add(early)
    in_flight.end(early)
    assert early.routed.arrival is not None
    assert early.routed.arrival.over.is_set()
    assert not early.routed.arrival.is_stored
