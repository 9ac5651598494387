"""Prompts that arrive together, or at once after an answer: who waits for whom."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvshare.fleet.routed_request import RoutedRequest
from kvshare.namespace import Owner
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.pipeline import Sharing
from tests.fake_vllm import FakeVllm
from tests.kvshare.fleet.served_fleet import FORM, OWNER, ServedFleet, eventually

Asked = list[asyncio.Task[RoutedRequest]]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No prefill takes too long, however busy the machine is."""
    monkeypatch.setattr("kvshare.fleet.router._PREFILL_S", 3600.0)
    monkeypatch.setattr("kvshare.sharing.arrivals._STORING_S", 60.0)


async def begin(fleet: ServedFleet, vllm: FakeVllm, *places: str) -> Asked:
    """The first is being computed over there, and the others have been looked up and wait."""
    arrivals = fleet.engine.server.in_flight.arrivals
    asked: Asked = []
    for number, place in enumerate(places):
        asked.append(asyncio.create_task(fleet.send(FORM.format(place=place))))
        await eventually(lambda: bool(vllm.generated))
        await eventually(lambda number=number: arrivals._num_waiting >= number)  # type: ignore[misc]
    return asked


async def test_those_that_come_next_wait_until_the_first_is_prefilled(
    fleet: ServedFleet, vllm: FakeVllm
) -> None:
    """Not until its answer is over; then they are planned from it."""
    vllm.prefill.clear()
    vllm.release.clear()
    asked = await begin(fleet, vllm, "Rome", "Paris", "Lima")
    assert len(vllm.generated) == 1
    vllm.prefill.set()
    await eventually(lambda: len(vllm.generated) == 3)
    assert not asked[0].done()
    _, *others = vllm.tickets
    assert all(ticket.copies for ticket in others)
    vllm.release.set()
    await asyncio.gather(*asked)
    await eventually(lambda: len(fleet.nodes) == 3)
    await eventually(lambda: not len(fleet.engine.server.in_flight.arrivals))


async def test_a_first_one_whose_client_leaves_holds_nobody(
    fleet: ServedFleet, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next is computed in full then, and is waited for."""
    looked_up: list[str] = []
    find_plan = Sharing.find_plan

    async def noted(self: Sharing, namespace: str, *arguments: Any, **options: Any) -> Lookup:
        found = await find_plan(self, namespace, *arguments, **options)
        looked_up.append(namespace)
        return found

    monkeypatch.setattr(Sharing, "find_plan", noted)
    vllm.prefill.clear()
    asked = await begin(fleet, vllm, "Rome", "Paris", "Lima")
    asked[0].cancel()
    await eventually(lambda: len(looked_up) == 5)  # the others again
    await eventually(lambda: len(vllm.generated) == 2)
    assert not vllm.tickets[1].copies
    assert len(fleet.engine.server.in_flight.arrivals) == 1
    vllm.prefill.set()
    await asyncio.gather(*asked[1:])
    assert vllm.tickets[2].copies
    await eventually(lambda: not len(fleet.engine.server.in_flight.arrivals))


async def test_a_first_one_that_vllm_refuses_holds_nobody(fleet: ServedFleet, vllm: FakeVllm) -> None:
    """Nothing of it is reported."""
    vllm.behaviour.status = 400
    first = await fleet.send(FORM.format(place="Rome"))
    assert first.progress.has_failed
    assert len(fleet.engine.server.in_flight.arrivals) == len(fleet.engine.server.in_flight) == 0
    vllm.behaviour.status = 200
    assert (await fleet.report("Oslo")).progress.is_complete


async def test_a_prefill_that_takes_far_too_long_is_not_waited_for(
    fleet: ServedFleet, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a vLLM that hangs: similar prompts are computed in full, as if nobody had come before."""
    monkeypatch.setattr("kvshare.fleet.router._PREFILL_S", 0.0)
    monkeypatch.setattr("kvshare.fleet.router._PATIENCE", 0.0)
    monkeypatch.setattr("kvshare.sharing.arrivals._STORING_S", 0.05)
    vllm.prefill.clear()
    asked = [asyncio.create_task(fleet.send(FORM.format(place=place))) for place in ("Rome", "Paris")]
    await eventually(lambda: len(vllm.generated) == 2)
    assert not any(ticket.copies for ticket in vllm.tickets)
    vllm.prefill.set()
    await asyncio.gather(*asked)


async def test_others_wait_for_nobody(fleet: ServedFleet, vllm: FakeVllm) -> None:
    """Arrivals are a namespace's, as what is stored is: of a tenant, a scope and a client's salt."""
    vllm.prefill.clear()
    owners = OWNER, Owner("globex", "tenant"), Owner("acme", "private"), OWNER.divided("salt")
    asked = [asyncio.create_task(fleet.send(FORM, owner=owner)) for owner in owners]
    await eventually(lambda: len(vllm.generated) == 4)
    vllm.prefill.set()
    await asyncio.gather(*asked)
    assert not any(ticket.copies for ticket in vllm.tickets)


async def test_what_is_not_to_be_stored_is_not_waited_for(fleet: ServedFleet, vllm: FakeVllm) -> None:
    """Nothing will come of it."""
    vllm.prefill.clear()
    asked = [asyncio.create_task(fleet.send(FORM, may_store=False)) for _ in range(2)]
    await eventually(lambda: len(vllm.generated) == 2)
    vllm.prefill.set()
    await asyncio.gather(*asked)
    assert vllm.tickets == []


async def test_who_asks_at_once_finds_the_answer_before(
    fleet: ServedFleet, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation goes on faster than the news travels: planning waits a moment for it."""
    monkeypatch.setattr("kvshare.fleet.router._RECONCILE_S", 60.0)  # a busy machine's moment
    first = FORM.format(place="Rome")
    await fleet.send(first)
    await fleet.send(first + vllm.behaviour.answer + " And now another question, please.")
    (copy, *_) = vllm.tickets[1].copies
    assert vllm.tickets[1].exact_length == len(first) + len(vllm.behaviour.answer)
    assert copy.target.start == 0


async def test_many_at_once(fleet: ServedFleet, vllm: FakeVllm) -> None:
    """Every prompt becomes a node, whatever the order of the news."""
    places = [f"place number {number} " * 20 for number in range(12)]
    await asyncio.gather(*(fleet.send(FORM.format(place=place)) for place in places))
    await eventually(lambda: len(fleet.nodes) == 12)
    for node in fleet.nodes:
        assert node.pieces.segment_ids <= vllm.segments.keys()
