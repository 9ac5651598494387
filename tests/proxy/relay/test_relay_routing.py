"""Which replica a request goes to."""

from __future__ import annotations

from pathlib import Path

from tests.fake_vllm import running_vllm
from tests.proxy.relay.relay_server import chat_body, running_relay

CHAT = "/v1/chat/completions"


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
