"""In front of a vLLM that decodes speculatively: what drafts are worth, and methods that are not handled."""

from __future__ import annotations

from pathlib import Path

from kvshare.part_problems import PartProblem
from kvshare.parts import ServedPart
from kvshare.reasons import Reason
from kvshare.requests import Decision
from kvshare.sharing.control import Rung
from tests.fake_vllm import Behaviour, running_vllm
from tests.kvshare.sharing.control.on_rung import put_on
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import running_relay

WHY = "speculative decoding by eagle3 drafts from hidden states"


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


async def test_requests_pass_unshared_while_a_method_is_on_that_is_not_handled(tmp_path: Path) -> None:
    """Nothing is looked up or rendered for them, and each says why."""
    async with (
        running_vllm(Behaviour(speculation="eagle3", passing=WHY)) as vllm,
        running_relay(tmp_path, vllm, wait=False) as relay,
    ):
        await eventually(lambda: any(each.info for each in relay.engine.fleet.replicas))
        answer = await relay.chat("Rome")
        assert answer.status == 200
        assert answer.headers["X-KVShare-Reason"] == "speculation"
        assert (vllm.rendered, vllm.tickets, len(vllm.generated)) == ([], [], 1)
        assert relay.counts.unshared[Reason.SPECULATION] == 1
        (part,) = (each for each in relay.engine.status().parts if each.part is ServedPart.REPLICA)
        assert (part.problem, part.cause) == (PartProblem.REPLICA_UNSHARED, WHY)


async def test_prompts_that_find_nothing_are_compared_like_those_of_experiments(tmp_path: Path) -> None:
    """Where they are not stored either. Those that are too short for the load take no part."""
    async with (
        running_vllm(Behaviour(speculation="ngram")) as vllm,
        running_relay(tmp_path, vllm) as relay,
    ):
        for rung, tickets in ((Rung.WANTED_SAVES, [((), False)]), (Rung.NOTHING, [])):
            vllm.seen.clear()
            put_on(relay.engine.server.runtime.control, rung)
            await relay.chat("Rome")
            assert [(each.copies, each.store) for each in vllm.tickets] == tickets
