"""All four generating routes in front of vLLM: rendered by vLLM, planned, and answered in their own words."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import anthropic
import openai
import pytest

from kvshare.requests import Decision
from kvshare.vllm_protocol.messages import digest_of
from tests.fake_vllm import MODEL, FakeVllm
from tests.proxy.conftest import key_of, key_settings
from tests.proxy.relay.bodies import PATHS, ask, body_of
from tests.proxy.relay.relay_server import LOCAL_SALT, Relay, running_relay

API = dict(zip(PATHS, ("chat", "completions", "responses", "messages"), strict=True))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_near_duplicate_is_planned_on_every_route(
    relay: Relay, vllm: FakeVllm, path: str, stream: bool
) -> None:
    """From what vLLM rendered of the very body; the answer's bytes are vLLM's."""
    await ask(relay, path, "Rome")
    response = await ask(relay, path, "Oslo", stream=stream)
    assert (response.status, await response.read()) == (200, vllm.sent)
    assert response.headers["X-KVShare-Decision"] == "approx"
    seen, rendered = vllm.generated[-1], vllm.rendered[-1]
    assert rendered.path == f"{path}/render"
    assert seen.raw.startswith(rendered.raw[:-1])
    assert rendered.body == body_of(path, "Oslo", stream=stream)
    assert seen.ticket is not None
    assert seen.ticket.prompt_digest == digest_of(vllm.tokens_of(seen.body))
    assert seen.ticket.copies
    assert relay.counts.executions[Decision.APPROX, Decision.APPROX, None] == 1
    assert vllm.tokenized == []


async def test_routes_share_with_each_other(relay: Relay, vllm: FakeVllm) -> None:
    """A prompt is its tokens, whichever route it came by."""
    shared = {"system": None, "instructions": None, "tools": None}
    for path in ("/v1/messages", "/v1/responses", "/v1/chat/completions"):
        await ask(relay, path, path[-4:], **shared)
    assert [bool(ticket.copies) for ticket in vllm.tickets] == [False, True, True]


@pytest.mark.parametrize("path", PATHS)
async def test_a_cache_salt_divides_on_every_route(relay: Relay, vllm: FakeVllm, path: str) -> None:
    """Plans and vLLM's own cache: only equal salts share, and none is vLLM's to read."""
    shares: dict[str | None, bool] = {}
    for salt in ("a", "b", None, LOCAL_SALT, "a", "b", None):
        await ask(relay, path, f"{salt}", cache_salt=salt)
        assert bool(vllm.tickets[-1].copies) is shares.get(salt, False)
        shares[salt] = True
    assert len({ticket.namespace for ticket in vllm.tickets}) == len(shares)
    for ticket in vllm.tickets:
        assert all(vllm.segments[copy.segment_id][0] == ticket.namespace for copy in ticket.copies)
    salts = [seen.body["cache_salt"] for seen in vllm.generated]
    assert len(set(salts[:4])) == 4
    assert salts[2] == LOCAL_SALT
    await ask(relay, path, "a", cache_salt="a", kvshare={"mode": "off"})
    assert vllm.generated[-1].body["cache_salt"] == salts[0]
    explained = [
        await (
            await relay.send(f"/admin/explain?api={API[path]}", body_of(path, "x", cache_salt=salt))
        ).json()
        for salt in ("c", "a")
    ]
    assert [bool(document["donors"]) for document in explained] == [False, True]


def _files_in(folder: Path) -> list[bytes]:
    return [file.read_bytes() for file in folder.rglob("*") if file.is_file()]


async def test_a_cache_salt_is_told_to_nobody(
    vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither vLLM nor the store, the log, metrics and administrators have it; refusals do not quote it."""
    secret = "salt-of-the-earth"
    caplog.set_level(logging.DEBUG)
    async with running_relay(tmp_path, vllm, index__backend="edge") as relay:
        for path in PATHS:
            await ask(relay, path, "Rome", cache_salt=secret, vllm_xargs={"cache_salt": secret})
        refused = await relay.send(PATHS[0], body_of(PATHS[0], "Rome", cache_salt=secret * 10))
        told = [await refused.read()]
        for path in ("/metrics", "/admin/stats", "/admin/tree", "/admin/requests"):
            told.append(await (await relay.send(path, method="GET")).read())
        assert relay.num_nodes > 0
    told += [seen.raw for seen in (*vllm.generated, *vllm.rendered)]
    told += _files_in(tmp_path)
    assert not [each for each in told if secret.encode() in each]
    assert secret not in caplog.text


@pytest.mark.parametrize("place", ["cache_salt", "vllm_xargs.cache_salt"])
@pytest.mark.parametrize(
    "path", [*PATHS, "/v1/messages/count_tokens", "/v1/embeddings", "/v1/some/new/route", "/admin/explain"]
)
async def test_what_is_no_salt_is_refused(relay: Relay, vllm: FakeVllm, path: str, place: str) -> None:
    """Before vLLM gets anything: taken as none, it would share what the client asked to keep apart."""
    salts: tuple[object, ...] = ("", 5, 0, False, [], {}, "x" * 129)
    for salt in salts:
        given = {"cache_salt": salt}
        wrong = given if place == "cache_salt" else {"vllm_xargs": given}
        response = await relay.send(path, {**body_of(PATHS[0], "Rome"), **wrong})
        assert response.status == 400
        assert place in (await response.json())["error"]["message"]
    assert vllm.seen + vllm.rendered + vllm.generated == []


@pytest.mark.parametrize("path", PATHS)
async def test_sharing_is_switched_off_in_any_body(relay: Relay, vllm: FakeVllm, path: str) -> None:
    """Nothing is rendered then, and the owner's salt is there all the same."""
    response = await ask(relay, path, "Rome", kvshare={"mode": "off"})
    assert "X-KVShare-Decision" not in response.headers
    assert vllm.rendered == []
    assert vllm.generated[0].body == {**body_of(path, "Rome"), "cache_salt": LOCAL_SALT}


@pytest.mark.parametrize(
    ("path", "end"),
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/responses", b""),
        ("/v1/messages", b""),
    ],
)
async def test_an_answer_that_breaks_off_says_so_in_its_routes_words(
    relay: Relay, vllm: FakeVllm, path: str, end: bytes
) -> None:
    """An error event, which the route's clients raise, behind every byte that vLLM sent."""
    vllm.behaviour.die_after_chunks = 3
    raw = await (await relay.send(path, body_of(path, "Rome", stream=True))).read()
    assert raw.startswith(vllm.sent)
    assert raw.endswith(end)
    events = [line for line in raw.removesuffix(end)[len(vllm.sent) :].split(b"\n") if line]
    assert events[0] == b"event: error" or path == "/v1/chat/completions"
    document = json.loads(events[-1].removeprefix(b"data: "))
    assert document["error"]["message"] == "The model server broke off this answer."
    assert document.get("type", "error") == "error"


async def test_the_openai_client_raises_for_a_response_that_breaks_off(relay: Relay, vllm: FakeVllm) -> None:
    """It knows errors of streams by a member of that name."""
    vllm.behaviour.die_after_chunks = 3
    async with relay.client() as client:
        stream = await client.responses.create(model=MODEL, input="hello " * 20, stream=True)
        with pytest.raises(openai.APIError, match="broke off"):
            async for _ in stream:
                pass


async def test_the_anthropic_client_raises_for_a_message_that_breaks_off(
    relay: Relay, vllm: FakeVllm
) -> None:
    """It knows errors of streams by their event's name."""
    vllm.behaviour.die_after_chunks = 3
    async with anthropic.AsyncAnthropic(base_url=relay.url, api_key="none", max_retries=0) as client:
        stream = await client.messages.create(**body_of("/v1/messages", "Rome"), stream=True)
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            async for _ in stream:
                pass


async def test_the_proxys_own_errors_are_in_the_routes_words(vllm: FakeVllm, tmp_path: Path) -> None:
    """Anthropic's clients name theirs by its type."""
    async with running_relay(tmp_path, vllm, auth__keys=key_settings()) as relay:
        async with anthropic.AsyncAnthropic(base_url=relay.url, api_key="wrong", max_retries=0) as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.messages.create(**body_of("/v1/messages", "Rome"))
        async with anthropic.AsyncAnthropic(
            base_url=relay.url, api_key=key_of("alice"), max_retries=0
        ) as client:
            with pytest.raises(anthropic.BadRequestError) as error:
                await client.messages.create(
                    **body_of("/v1/messages", "Rome"), extra_body={"kvshare": {"mode": "maybe"}}
                )
    assert isinstance(error.value.body, dict)
    assert error.value.body["error"]["type"] == "invalid_request_error"
    assert vllm.seen == []


async def test_a_response_that_only_says_it_began_has_no_token_yet(relay: Relay, vllm: FakeVllm) -> None:
    """Its first events come before anything is computed, and are no time to first token."""
    vllm.prefill.clear()
    asking = relay.http.post(f"{relay.url}/v1/responses", json=body_of("/v1/responses", "Rome", stream=True))
    async with asking as response:
        assert b"response.created" in await response.content.readany()
        await asyncio.sleep(0.3)
        vllm.prefill.set()
        assert b"response.completed" in await response.read()
    metrics = await (await relay.send("/metrics", method="GET")).text()
    name = "kvshare_time_to_first_token_seconds_sum"
    (line,) = [entry for entry in metrics.splitlines() if entry.startswith(name)]
    assert float(line.rpartition(" ")[2]) >= 0.3


@pytest.mark.parametrize("path", PATHS)
async def test_a_slash_at_the_end_changes_nothing(relay: Relay, vllm: FakeVllm, path: str) -> None:
    """vLLM would answer with a redirect to an address that is not the clients'."""
    response = await relay.send(f"{path}/?a=1", body_of(path, "Rome"))
    assert response.headers["X-KVShare-Decision"] == "full"
    (seen,) = vllm.seen
    assert (seen.path, seen.ticket is not None) == (f"{path}?a=1", True)
    assert [entry.path for entry in vllm.rendered] == [f"{path}/render"]


async def test_counting_tokens_is_passed_through(relay: Relay, vllm: FakeVllm) -> None:
    """It computes nothing, and its body has no salt."""
    body = body_of("/v1/messages", "Rome")
    assert (await relay.send("/v1/messages/count_tokens", body)).status == 203
    (seen,) = vllm.seen
    assert (seen.path, seen.body) == ("/v1/messages/count_tokens", body)


@pytest.mark.parametrize(
    "path",
    [
        *(f"{path}/render" for path in PATHS),
        *("/v1/chat/completions/derender", "/v1/messages/render/", "/v1/messages/%72ender?a=1"),
    ],
)
async def test_rendering_is_for_admins_only(vllm: FakeVllm, tmp_path: Path, path: str) -> None:
    """However it is written: what is rendered names the salt of its owner."""
    async with running_relay(tmp_path, vllm, auth__keys=key_settings()) as relay:
        url = relay.url + path
        answers = []
        for name in ("alice", "root"):
            headers = {"Authorization": f"Bearer {key_of(name)}"}
            async with relay.http.post(url, json={"prompt": "x"}, headers=headers) as response:
                answers.append(response.status)
    assert answers[0] == 403
    assert answers[1] in (200, 203)
    assert len(vllm.seen) + len(vllm.rendered) == 1


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/inference/v1/abort_requests", "/tokenize"])
async def test_vllms_other_routes_are_not_there(relay: Relay, vllm: FakeVllm, path: str) -> None:
    """Tokens in, tokens out: whoever reached it could name another's KV."""
    assert (await relay.send(path, {"token_ids": [1, 2]})).status == 404
    assert vllm.seen == []
