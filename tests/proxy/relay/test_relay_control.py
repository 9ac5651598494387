"""In front of vLLM: what the controller serves without sharing, and what it learns from answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvshare.sharing.control.blocks import Arm
from tests.fake_vllm import FakeVllm
from tests.proxy.relay.relay_server import LOCAL_SALT, Relay, chat_body, running_relay


@pytest.fixture
async def unshared(tmp_path: Path, vllm: FakeVllm) -> AsyncIterator[Relay]:
    """Every block of time is served without sharing."""
    async with running_relay(
        tmp_path / "store", vllm, control__unshared_share=1.0, control__first_requests=0
    ) as server:
        yield server


def num_requests(relay: Relay, arm: Arm = Arm.UNSHARED) -> int:
    control = relay.engine.status().control
    assert control is not None
    return control.num_requests[arm]


async def test_a_block_without_sharing_is_served_as_stock_vllm_serves_it(
    unshared: Relay, vllm: FakeVllm
) -> None:
    """No ticket, so neither a copy nor a save; the header and the counters say why."""
    for place in ("Rome", "Oslo"):
        answer = await unshared.chat(place)
        assert answer.status == 200
        assert answer.headers["X-KVShare-Reason"] == "experiment"
        assert answer.headers["X-KVShare-Plan"].startswith("exact=0")
    assert vllm.tickets == []
    assert {seen.body["cache_salt"] for seen in vllm.generated} == {LOCAL_SALT}
    assert unshared.num_nodes == 0
    metrics = await (await unshared.send("/metrics", method="GET")).text()
    assert 'kvshare_lookup_requests_total{reason="experiment",result="miss"} 2.0' in metrics
    assert 'kvshare_control_requests_total{arm="unshared"} 2.0' in metrics


@pytest.mark.parametrize(
    ("body", "reason", "num_tickets"),
    [
        (chat_body("Rome", kvshare={"mode": "off"}), "off", 0),
        (chat_body("Rome", kvshare={"no_store": False}), "no_candidates", 1),
        ({"model": "tiny", "messages": []}, "short_prompt", 1),
    ],
)
async def test_requests_that_take_no_part(
    unshared: Relay, vllm: FakeVllm, body: dict[str, object], reason: str, num_tickets: int
) -> None:
    """Those that share nothing anyway, and those that say that they are to be stored."""
    answer = await unshared.ask(body)
    assert answer.headers["X-KVShare-Reason"] == reason
    assert len(vllm.tickets) == num_tickets
    assert num_requests(unshared) == 0


async def test_without_a_share_for_it_nothing_is_served_unshared(relay: Relay, vllm: FakeVllm) -> None:
    """And every request is one as usual."""
    for place in ("Rome", "Oslo", "Bern"):
        await relay.chat(place)
    assert len(vllm.tickets) == 3
    assert (num_requests(relay), num_requests(relay, Arm.USUAL)) == (0, 3)


@pytest.mark.parametrize("extra", [{}, {"stream": True}])
@pytest.mark.parametrize("status", [200, 503])
async def test_what_complete_answers_took_is_compared(
    tmp_path: Path, vllm: FakeVllm, extra: dict[str, object], status: int
) -> None:
    """Each answer is a block of its own here. Those that vLLM refuses say nothing."""
    async with running_relay(tmp_path / "store", vllm, control__block_s=1e-6) as server:
        vllm.behaviour.status = status
        for number in range(8):
            await server.ask(chat_body(f"Rome {number}", **extra))
        control = server.engine.status().control
        assert control is not None
        assert control.num_requests[Arm.USUAL] == 8
        (load,) = control.loads
        assert (load.load, load.rung) == ("1", 0)
        assert (load.num_blocks_more > 2) == (status == 200)
