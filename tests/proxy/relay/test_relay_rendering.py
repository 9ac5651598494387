"""Bodies that vLLM renders into tokens, and those that are relayed without a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvshare.reasons import Reason
from kvshare.vllm_protocol.messages import digest_of
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.proxy.conftest import eventually
from tests.proxy.relay.bodies import PATHS, ask, body_of
from tests.proxy.relay.relay_server import FORM, LOCAL_SALT, Relay, running_relay

NEW_PATHS = ("/v1/responses", "/v1/messages")
GIVEN_BACK = ("/v1/chat/completions", *NEW_PATHS)


@pytest.mark.parametrize("path", PATHS)
async def test_what_is_rendered_says_nothing_about_kv(relay: Relay, vllm: FakeVllm, path: str) -> None:
    """Neither a client's ticket, tokens and salt, nor what is the proxy's own."""
    ticket = {"copies": [[1, 0, 9, 0, 0]]}
    stolen = {
        "kv_transfer_params": {"kvshare": ticket, "prompt_token_ids": [1], "x": 1},
        "cache_salt": "globex",
    }
    await ask(relay, path, "Rome", **stolen, kvshare={"mode": "exact"}, vllm_xargs={"cache_salt": "x"})
    assert vllm.rendered[0].body == body_of(path, "Rome", vllm_xargs={})
    assert set(vllm.generated[0].body["kv_transfer_params"]) <= {"kvshare", "prompt_token_ids"}
    assert [1] not in vllm.generated[0].body["kv_transfer_params"].values()
    assert vllm.tickets[0].copies == ()


@pytest.mark.parametrize("path", GIVEN_BACK)
async def test_vllm_is_given_back_what_it_rendered(relay: Relay, vllm: FakeVllm, path: str) -> None:
    """The tokens of the plan, so that it does not apply template and tokenizer a second time."""
    for place in ("Rome", "Oslo"):
        await ask(relay, path, place)
    for seen, ticket in zip(vllm.generated, vllm.tickets, strict=True):
        ids = seen.body["kv_transfer_params"]["prompt_token_ids"]
        assert ids == vllm.tokens_of(seen.body)
        assert ticket.prompt_digest == digest_of(ids)
    assert vllm.tickets[1].copies


@pytest.mark.parametrize(
    ("path", "extra"),
    [
        ("/v1/completions", {}),  # vLLM reads no tokens beside its prompt
        ("/v1/messages", {"thinking": {"type": "disabled"}}),  # the route may render it otherwise
        ("/v1/chat/completions", {"kvshare": {"mode": "off"}}),
        ("/v1/chat/completions", {"kvshare": {"no_store": True}}),  # without a donor: no ticket
    ],
)
async def test_what_need_not_be_the_same_is_not_given_back(
    relay: Relay, vllm: FakeVllm, path: str, extra: dict[str, Any]
) -> None:
    """vLLM renders it itself, as it would without the proxy."""
    await ask(relay, path, "Rome", **extra)
    assert "prompt_token_ids" not in (vllm.generated[0].body.get("kv_transfer_params") or {})


async def test_tokens_are_given_back_to_the_vllm_that_rendered_them(tmp_path: Path) -> None:
    """Another replica may have another template: it renders for itself, and the ticket's digest decides."""
    async with (
        running_vllm() as one,
        running_vllm() as two,
        running_relay(tmp_path, one, two) as relay,
    ):
        for number in range(8):
            await ask(relay, "/v1/chat/completions", f"Rome {number}")
        num_given = 0
        for vllm in (one, two):
            rendered = [vllm.tokens_of(seen.body) for seen in vllm.rendered]
            for seen in vllm.generated:
                ids = seen.body["kv_transfer_params"].get("prompt_token_ids")
                assert (ids is not None) == (vllm.tokens_of(seen.body) in rendered)
                num_given += ids is not None
        assert 0 < num_given < 8


@pytest.mark.parametrize(
    ("path", "extra", "reason"),
    [
        ("/v1/responses", {"previous_response_id": "resp_1"}, "previous_response"),
        ("/v1/responses", {"background": True, "store": True}, "background"),
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "multimodal"),
        ("/v1/responses", {"input": 3}, "malformed"),
        ("/v1/responses", {"model": "an-adapter"}, "adapter"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "multimodal"),
        ("/v1/messages", {"messages": [3]}, "malformed"),
        ("/v1/messages", {"model": "an-adapter"}, "adapter"),
    ],
)
async def test_what_cannot_be_planned_is_relayed_as_it_is(
    relay: Relay, vllm: FakeVllm, path: str, extra: dict[str, Any], reason: str
) -> None:
    """Without asking vLLM to render it, and with a count of why."""
    response = await relay.send(path, body_of(path, "Rome", **extra))
    assert response.status == 200
    assert vllm.rendered == []
    assert vllm.generated[0].body == {**body_of(path, "Rome", **extra), "cache_salt": LOCAL_SALT}
    assert relay.counts.unshared[Reason(reason)] == 1


async def test_what_vllm_renders_as_more_than_text_is_not_planned(relay: Relay, vllm: FakeVllm) -> None:
    """Two images have the same tokens."""
    vllm.behaviour.features = {"mm_hashes": {"image": ["1"]}}
    await relay.send("/v1/messages", body_of("/v1/messages", "Rome"))
    assert vllm.tickets == []
    assert relay.counts.unshared[Reason.MULTIMODAL] == 1


async def test_content_that_is_nested_without_end_costs_the_plan_only(relay: Relay, vllm: FakeVllm) -> None:
    """Whatever the depth of its parts, the request is served."""
    content: object = "x"
    for _ in range(300):
        content = [{"type": "tool_result", "content": content}]
    body = body_of("/v1/messages", "Rome", messages=[{"role": "user", "content": content}])
    assert (await relay.send("/v1/messages", body)).status == 200
    assert len(vllm.generated) == 1


async def test_where_no_replica_shares_nothing_is_rendered(tmp_path: Path) -> None:
    """It would only take time: vLLM renders for itself."""
    async with (
        running_vllm(Behaviour(refusals=("not today",))) as vllm,
        running_relay(tmp_path, vllm, wait=False) as relay,
    ):
        await eventually(lambda: bool(relay.engine.fleet.serving()))
        assert (await relay.send("/v1/messages", body_of("/v1/messages", "Rome"))).status == 200
        assert (vllm.rendered, len(vllm.generated)) == ([], 1)
        assert relay.counts.unshared[Reason.NO_CONNECTOR] == 1


@pytest.mark.parametrize("path", PATHS)
async def test_rules_act_before_a_body_is_rendered(vllm: FakeVllm, tmp_path: Path, path: str) -> None:
    """What vLLM renders is what it computes, on every route."""
    rules = [{"name": "clock", "match": "12:[0-9]{2}", "action": "pin", "value": "noon"}]
    async with running_relay(tmp_path, vllm, rules=rules) as relay:
        response = await ask(relay, path, "Rome\n12:01\n")
        assert response.headers["X-KVShare-Rules"] == "clock"
        assert vllm.rendered[0].body == body_of(path, "Rome\nnoon\n")
        assert vllm.generated[0].raw.startswith(vllm.rendered[0].raw[:-1])


async def test_a_truncated_prompt_is_planned_as_vllm_cuts_it(relay: Relay, vllm: FakeVllm) -> None:
    """What is rendered is what is computed; a prompt of tokens is rendered for that, too."""
    cut = list(FORM.encode())[-200:]
    vllm.tokens_of = lambda body: cut  # type: ignore[method-assign]  # the fake's own
    for prompt in (FORM, list(FORM.encode())):
        await relay.send("/v1/completions", {"prompt": prompt, "truncate_prompt_tokens": 200})
    assert [ticket.prompt_digest for ticket in vllm.tickets] == [digest_of(cut)] * 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_without_render_routes_chats_are_tokenized(tmp_path: Path, path: str) -> None:
    """A stock `vllm serve` without the option: planned as well, and asked for the routes once only."""
    async with running_vllm(Behaviour(renders=False)) as vllm, running_relay(tmp_path, vllm) as relay:
        for place in ("Rome", "Oslo"):
            await ask(relay, path, place)
        assert (len(vllm.rendered), len(vllm.tokenized)) == (1, 2)
        assert vllm.tickets[1].copies
        await relay.send(path, body_of(path, "Rome", truncate_prompt_tokens=5))
        assert relay.counts.unshared[Reason.TRUNCATED] == 1


@pytest.mark.parametrize("path", NEW_PATHS)
async def test_without_render_routes_the_others_are_relayed(
    tmp_path: Path, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Unplanned, and the log says once what to do about it; a vLLM that comes back is asked again."""
    async with running_vllm(Behaviour(renders=False)) as vllm, running_relay(tmp_path, vllm) as relay:
        for place in ("Rome", "Oslo"):
            assert (await ask(relay, path, place)).status == 200
        assert vllm.tickets == []
        assert vllm.generated[0].body["cache_salt"] == LOCAL_SALT
        assert relay.counts.unshared[Reason.NO_RENDER] == 2
        assert caplog.text.count("start vLLM with --enable-scale-out") == 1
        await vllm.stop()
        (replica,) = relay.engine.fleet.replicas
        await eventually(lambda: not replica.serves)
        vllm.behaviour.renders = True
        await vllm.restart()
        await eventually(lambda: replica.shares)
        await ask(relay, path, "Rome")
        assert len(vllm.tickets) == 1


async def test_a_replica_that_renders_does_so_for_the_others(tmp_path: Path) -> None:
    """Tokens are the model's; which replica says them does not matter."""
    async with (
        running_vllm(Behaviour(renders=False)) as one,
        running_vllm() as two,
        running_relay(tmp_path, one, two) as relay,
    ):
        for place in ("Rome", "Oslo", "Bern"):
            await ask(relay, "/v1/messages", place)
        assert len(one.rendered) <= 1
        assert len(two.rendered) == 3
        assert Reason.NO_RENDER not in relay.counts.unshared
