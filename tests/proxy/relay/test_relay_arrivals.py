"""Prompts that arrive together, or at once after an answer: who waits for whom."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.fake_vllm import FakeVllm
from tests.proxy.conftest import eventually, key_of, key_settings
from tests.proxy.relay.relay_server import Relay, chat_body, running_relay


class TestAtOnce:
    """Forms that arrive together, with nothing stored: the first is computed, the others wait and copy."""

    async def begin(self, relay: Relay, vllm: FakeVllm, *places: str) -> list[asyncio.Task[object]]:
        """The first is being computed over there, and the others have been looked up."""
        asked: list[asyncio.Task[object]] = []
        for place in places:
            asked.append(asyncio.create_task(relay.send("/v1/chat/completions", chat_body(place))))
            await eventually(lambda: bool(vllm.generated))
            await asyncio.sleep(0.05)
        return asked

    async def test_those_that_come_next_wait_until_the_first_is_prefilled(
        self, relay: Relay, vllm: FakeVllm
    ) -> None:
        """Not until its answer is over; then they are planned from it."""
        vllm.prefill.clear()
        vllm.release.clear()
        asked = await self.begin(relay, vllm, "Rome", "Paris", "Lima")
        assert len(vllm.generated) == 1
        vllm.prefill.set()
        await eventually(lambda: len(vllm.generated) == 3)
        assert not asked[0].done()
        _, *others = vllm.tickets
        assert all(ticket.copies for ticket in others)
        vllm.release.set()
        await asyncio.gather(*asked)
        await eventually(lambda: relay.num_nodes == 3)
        await eventually(lambda: not len(relay.engine.server.in_flight.arrivals))

    async def test_a_first_one_that_fails_holds_nobody(
        self, relay: Relay, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The next is computed in full then, and is waited for."""
        monkeypatch.setattr("kvshare.fleet.router._PREFILL_S", 3600.0)
        vllm.prefill.clear()
        asked = await self.begin(relay, vllm, "Rome", "Paris", "Lima")
        asked[0].cancel()
        await eventually(lambda: len(vllm.generated) == 2)
        assert not vllm.tickets[1].copies
        assert len(relay.engine.server.in_flight.arrivals) == 1
        vllm.prefill.set()
        await asyncio.gather(*asked[1:])
        assert vllm.tickets[2].copies
        await eventually(lambda: not len(relay.engine.server.in_flight.arrivals))

    async def test_a_prefill_that_takes_far_too_long_is_not_waited_for(
        self, relay: Relay, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As of a vLLM that hangs: similar prompts are computed in full, as if nobody had come before."""
        monkeypatch.setattr("kvshare.fleet.router._PREFILL_S", 0.0)
        monkeypatch.setattr("kvshare.fleet.router._PATIENCE", 0.0)
        vllm.prefill.clear()
        asked = await self.begin(relay, vllm, "Rome", "Paris")
        await eventually(lambda: len(vllm.generated) == 2)
        assert not any(ticket.copies for ticket in vllm.tickets)
        vllm.prefill.set()
        await asyncio.gather(*asked)

    async def test_an_answer_that_has_begun_is_waited_for_only_briefly(
        self, relay: Relay, vllm: FakeVllm
    ) -> None:
        """Its first token is there, but nothing is reported of it."""
        vllm.behaviour.silent = True
        vllm.behaviour.token_s = 20.0
        first = asyncio.create_task(relay.send("/v1/chat/completions", chat_body("Rome", stream=True)))
        await eventually(lambda: bool(vllm.generated))
        await asyncio.wait_for(relay.send("/v1/chat/completions", chat_body("Paris")), 60)
        assert not first.done()
        first.cancel()

    async def test_other_tenants_wait_for_nobody(self, vllm: FakeVllm, tmp_path: Path) -> None:
        """Arrivals are a namespace's, as what is stored is."""
        vllm.prefill.clear()
        async with running_relay(tmp_path, vllm, auth__keys=key_settings()) as relay:
            asked = [
                asyncio.create_task(
                    relay.send(
                        "/v1/chat/completions",
                        chat_body("Rome"),
                        Authorization=f"Bearer {key_of(name)}",
                    )
                )
                for name in ("alice", "carol", "eve")
            ]
            await eventually(lambda: len(vllm.generated) == 3)
            vllm.prefill.set()
            await asyncio.gather(*asked)


async def test_who_asks_at_once_finds_the_answer_before(
    relay: Relay, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation goes on faster than the news travels: planning waits a moment for it."""
    monkeypatch.setattr("kvshare.fleet.router._RECONCILE_S", 10.0)  # a busy machine's moment
    await relay.send("/v1/chat/completions", chat_body("Rome"))
    await relay.send("/v1/chat/completions", chat_body("Oslo"))
    assert vllm.tickets[1].copies


async def test_many_at_once(relay: Relay, vllm: FakeVllm) -> None:
    """Every prompt becomes a node, whatever the order of the news."""
    places = [f"place number {number} " * 20 for number in range(20)]
    await asyncio.gather(*(relay.send("/v1/chat/completions", chat_body(place)) for place in places))
    await eventually(lambda: relay.num_nodes == 20)
    for node in relay.engine.sharing.tree.nodes():
        assert node.pieces.segment_ids <= vllm.segments.keys()
