"""Data-parallel ranks behind one API: a request names the one that it is for in vLLM's own header."""

from __future__ import annotations

from pathlib import Path

from kvshare.vllm_protocol.messages import RANK_HEADER
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.proxy.relay.relay_server import Relay, running_relay


async def test_a_request_names_the_rank_it_was_planned_for(tmp_path: Path) -> None:
    """Also one that is only passed through. What a client says about ranks is dropped."""
    async with (
        running_vllm(Behaviour(rank=0)) as first,
        running_vllm(Behaviour(rank=1)) as second,
        running_relay(tmp_path, first, second) as relay,
    ):
        for place in ("Rome", "Oslo", "Bern"):
            await relay.chat(place)
        await relay.send("/v1/other", {}, X_Data_Parallel_Rank="7")
        for rank, replica in enumerate((first, second)):
            assert {seen.headers.get(RANK_HEADER) for seen in replica.seen} <= {str(rank)}
        assert len(first.seen) + len(second.seen) == 4


async def test_where_there_are_no_ranks_none_is_named(relay: Relay, vllm: FakeVllm) -> None:
    """Neither by the proxy nor by a client."""
    await relay.send("/v1/other", {}, X_Data_Parallel_Rank="7")
    await relay.chat("Rome")
    assert all(RANK_HEADER not in seen.headers for seen in vllm.seen)
