"""Which replica a request goes to."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import OTHER, chat_body, running_relay

CHAT = "/v1/chat/completions"


async def test_a_replica_with_another_model_gets_nothing(
    vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first model that was seen counts; the other is told in the log."""
    async with running_relay(tmp_path, vllm, wait=False) as relay:
        await relay.chat("Rome")
    async with (
        running_vllm(Behaviour(names=("huge",))) as other,
        running_relay(tmp_path, vllm, other, wait=False) as relay,
    ):
        await eventually(lambda: "gets no requests" in caplog.text)
        for _ in range(4):
            assert (await relay.send(CHAT, chat_body("Oslo"))).status == 200
        assert min(len(vllm.generated) - 1, len(other.generated)) == 0


async def test_a_request_goes_where_its_donor_is(tmp_path: Path) -> None:
    """KV cannot move: of two replicas the one that has it computes, whoever is idler."""
    async with (
        running_vllm() as one,
        running_vllm() as two,
        running_relay(tmp_path, one, two) as relay,
    ):
        await relay.chat("Rome")
        await relay.ask(OTHER)
        assert len(one.generated) == len(two.generated) == 1
        for place in ("Oslo", "Bonn", "Bern", "Nice"):
            await relay.chat(place)
        rome = one if "Rome" in str(one.generated[0].body) else two
        assert len(rome.generated) == 5
        assert all(ticket.copies for ticket in rome.tickets[1:])
        assert one.tickets[0].namespace != two.tickets[0].namespace


async def test_probes_do_not_change_which_replica_is_next(tmp_path: Path) -> None:
    """Idle replicas take turns, request by request; questions in between do not count."""
    async with (
        running_vllm() as one,
        running_vllm() as two,
        running_relay(tmp_path, one, two) as relay,
    ):
        for number in range(1, 5):
            await relay.chat("Rome", kvshare={"mode": "off"})
            await relay.send("/ready", method="GET")
            await relay.send("/metrics", method="GET")
            assert {len(one.generated), len(two.generated)} == {number // 2, (number + 1) // 2}


async def test_an_overloaded_replicas_donors_are_passed_over(tmp_path: Path) -> None:
    """It has so many requests more than the other one that waiting would cost more than computing."""
    async with (
        running_vllm() as one,
        running_vllm() as two,
        running_relay(tmp_path, one, two, vllm__max_imbalance=2) as relay,
    ):
        await relay.chat("Rome")
        home, other = (one, two) if one.generated else (two, one)
        home.release.clear()
        asking = [asyncio.create_task(relay.send(CHAT, chat_body("Oslo"))) for _ in range(2)]
        await eventually(lambda: len(home.generated) == 3)
        await relay.send(CHAT, chat_body("Bonn"))
        assert len(other.generated) == 1
        assert other.tickets[0].copies == ()
        home.release.set()
        await asyncio.gather(*asking)


async def test_a_replica_that_is_gone_is_replaced_before_the_first_byte(tmp_path: Path) -> None:
    """The request had a plan for it; the other one computes it whole, and the client sees nothing of it."""
    async with (
        running_vllm() as one,
        running_vllm() as two,
        running_relay(tmp_path, one, two, vllm__health_interval_s=30.0) as relay,
    ):
        await relay.chat("Rome")
        home, other = (one, two) if one.generated else (two, one)
        await home.stop()
        for _ in range(3):
            response = await relay.send(CHAT, chat_body("Oslo"))
            assert response.status == 200
        assert len(other.generated) == 3
        name = home.url.removeprefix("http://")
        assert relay.counts.replica_failures[name] <= 1
