"""In front of a vLLM that decodes speculatively: what drafts are worth, and methods that are not handled."""

from __future__ import annotations

from pathlib import Path

from kvshare.reasons import Reason
from kvshare.requests import Decision
from tests.fake_vllm import Behaviour, running_vllm
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import LOCAL_SALT, running_relay


async def test_steps_and_tokens_of_answers_are_counted_by_decision(tmp_path: Path) -> None:
    async with (
        running_vllm(Behaviour(speculation="ngram")) as vllm,
        running_relay(tmp_path, vllm) as relay,
    ):
        await relay.chat("Rome")
        await eventually(lambda: relay.counts.answer_steps[Decision.FULL] == 2)
        text = await (await relay.send("/metrics", method="GET")).text()
        assert 'kvshare_speculative_steps_total{executed="full"} 2.0' in text
        assert 'kvshare_speculative_tokens_total{executed="full"} 5.0' in text


async def test_experiments_without_sharing_are_reported_too(tmp_path: Path) -> None:
    """Or there would be nothing to compare with: by a ticket that copies nothing and stores nothing."""
    async with (
        running_vllm(Behaviour(speculation="ngram")) as vllm,
        running_relay(tmp_path, vllm, control__unshared_share=1.0, control__first_requests=0) as relay,
    ):
        answer = await relay.chat("Rome")
        assert answer.headers["X-KVShare-Reason"] == "experiment"
        (ticket,) = vllm.tickets
        assert (ticket.copies, ticket.store) == ((), False)
        assert {seen.body["cache_salt"] for seen in vllm.generated} == {LOCAL_SALT}
        await eventually(lambda: relay.counts.answer_steps[Decision.FULL] == 2)
        assert relay.num_nodes == 0
        assert vllm.segments == {}


async def test_requests_pass_unshared_while_a_method_is_on_that_is_not_handled(tmp_path: Path) -> None:
    """Nothing is looked up or rendered for them, and each says why."""
    why = "speculative decoding by eagle3 drafts from hidden states"
    async with (
        running_vllm(Behaviour(speculation="eagle3", passing=why)) as vllm,
        running_relay(tmp_path, vllm, wait=False) as relay,
    ):
        await eventually(lambda: any(each.info for each in relay.engine.fleet.replicas))
        answer = await relay.chat("Rome")
        assert answer.status == 200
        assert answer.headers["X-KVShare-Reason"] == "speculation"
        assert (vllm.rendered, vllm.tickets, len(vllm.generated)) == ([], [], 1)
        assert relay.counts.unshared[Reason.SPECULATION] == 1
