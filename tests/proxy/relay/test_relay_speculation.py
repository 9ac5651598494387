"""In front of a vLLM that decodes speculatively: what drafts are worth, and methods that are not handled."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kvshare.part_problems import PartProblem
from kvshare.parts import ServedPart
from kvshare.reasons import Reason
from kvshare.requests import Decision
from kvshare.sharing.control import Rung
from tests.fake_connector import BYTES_PER_TOKEN
from tests.fake_vllm import Behaviour, running_vllm
from tests.kvshare.sharing.control.on_rung import put_on
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import LOCAL_SALT, running_relay

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


@pytest.mark.parametrize(
    "behaviour", [{"speculation": "eagle3", "passing": WHY}, {"refusals": ("sliding windows",)}]
)
async def test_one_that_shares_nothing_limits_no_other(tmp_path: Path, behaviour: dict[str, Any]) -> None:
    """It knows neither the model's KV nor whether keys can be moved, whichever of them is connected last."""
    async with (
        running_vllm(Behaviour()) as sharing,
        running_vllm(Behaviour(**behaviour)) as passing,
        running_relay(tmp_path, passing, sharing, wait=False) as relay,
    ):
        await eventually(lambda: all(each.is_connected for each in relay.engine.fleet.replicas))
        limits = relay.engine.sharing.limits
        assert (limits.can_move_keys, limits.can_probe) == (True, True)
        assert relay.engine.sharing.cost.rates.bytes_per_token == BYTES_PER_TOKEN


async def test_what_is_only_compared_is_not_what_was_planned(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A prefix in vLLM's own cache makes no answer shared, and nothing was carried out otherwise."""
    caplog.set_level(logging.INFO)
    async with (
        running_vllm(Behaviour(speculation="ngram", caches_prefixes=True)) as vllm,
        running_relay(tmp_path, vllm, control__unshared_share=1.0, control__first_requests=0) as relay,
    ):
        await relay.chat("Rome")
        await eventually(lambda: relay.counts.answer_steps[Decision.FULL] == 2)
        assert not relay.counts.answer_steps[Decision.EXACT]
        assert "carried out as" not in caplog.text


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
