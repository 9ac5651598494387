"""The client of vLLM's own API: what it reads, what counts as an answer, and what is sent twice."""

from __future__ import annotations

import json

import pytest

from kvshare.errors import UpstreamError, WrongServerError
from kvshare.fleet.client import ServedModels, VllmClient
from kvshare.settings import load_settings
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.kvshare.fleet.http_servers import raw_server, reply, unused_port

COMPLETION = {"model": "tiny", "prompt": "a", "stream": True}


def vllm_client(url: str, **changes: object) -> VllmClient:
    given = {f"vllm.{name}": value for name, value in changes.items()}
    return VllmClient(url, load_settings(overrides={"vllm.control_timeout_s": 60.0, **given}).vllm)


async def test_models_are_those_without_a_parent(vllm: FakeVllm) -> None:
    """An adapter is listed, and is not the served model; the shortest context counts."""
    vllm.behaviour.adapters = ("poet",)
    vllm.behaviour.names = ("tiny", "tiny-too")
    async with vllm_client(vllm.url) as client:
        await client.check_health()
        assert await client.models() == ServedModels(("tiny", "tiny-too"), 4096)
        assert [entry["id"] for entry in await client.list_models()] == ["tiny", "tiny-too", "poet"]


@pytest.mark.parametrize("document", ["[]", "3", "null", "{}", '{"data": {}}', '{"data": null}'])
async def test_what_lists_no_models_is_no_vllm(document: str) -> None:
    async with raw_server(reply(document.encode())) as server, vllm_client(server.url) as client:
        with pytest.raises(UpstreamError, match="/v1/models: expected a list of models"):
            await client.models()


async def test_entries_that_are_no_models_are_passed_over() -> None:
    """And a model that does not say how long its context is."""
    listed = reply(b'{"data": [3, null, {"id": "m"}, {"id": "n", "max_model_len": "long"}]}')
    async with raw_server(listed) as server, vllm_client(server.url) as client:
        assert await client.models() == ServedModels(("m", "n"), 0)


async def test_tokens_and_prompts_are_read(vllm: FakeVllm) -> None:
    """Of `/tokenize` one prompt; of `/render` each that a body has."""
    async with vllm_client(vllm.url) as client:
        tokens = await client.tokenize({"prompt": "abc"})
        (prompt,) = await client.render("/v1/completions", b'{"prompt": "abc"}')
    assert tokens.token_ids.tolist() == prompt.tokens.token_ids.tolist() == [97, 98, 99]
    assert json.loads(prompt.tokens.raw) == [97, 98, 99]
    assert (prompt.vllm_url, prompt.media) == (vllm.url, ())


async def test_several_lists_of_tokens_are_not_those_of_a_prompt() -> None:
    two = reply(b'[{"tokens": [1]}, {"tokens": [2]}]')
    async with raw_server(two) as server, vllm_client(server.url) as client:
        with pytest.raises(UpstreamError, match="/tokenize: expected one object, got 2"):
            await client.tokenize({})


async def test_no_tokens_and_no_route_are_told_apart() -> None:
    """By the status: what has no route is not asked again."""
    async with running_vllm(Behaviour(renders=False)) as vllm, vllm_client(vllm.url) as client:
        with pytest.raises(UpstreamError) as refused:
            await client.render("/v1/completions", b'{"prompt": "a"}')
    assert refused.value.status == 403
    async with raw_server(reply(b'{"token_ids": ["a"]}')) as server, vllm_client(server.url) as client:
        with pytest.raises(UpstreamError, match="render: expected token_ids, a list of token ids") as wrong:
            await client.render("/v1/completions", b"{}")
    assert wrong.value.status is None


async def test_a_client_that_is_nested_without_end_ends_nothing() -> None:
    deep = b'{"token_ids": [1], "features": ' + b"[" * 100_000
    async with raw_server(reply(deep)) as server, vllm_client(server.url) as client:
        with pytest.raises(UpstreamError, match="expected token_ids"):
            await client.render("/v1/messages", b"{}")


@pytest.mark.parametrize("size", [1, (1 << 18) + 1])
async def test_a_body_arrives_whole(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small or large, with vLLM's key in place of the client's; the path is not encoded again."""
    monkeypatch.setenv("KVSHARE_VLLM_API_KEY", "vllm")
    async with raw_server(reply(b"ok")) as server, vllm_client(server.url) as client:
        headers = {"Authorization": "Bearer client", "X-Mine": "1"}
        response = await client.send("POST", "/v1/a%2Fb?c=%20", headers=headers, body=b"x" * size)
        assert await response.read() == b"ok"
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    assert body == b"x" * size
    assert head.startswith(b"POST /v1/a%2Fb?c=%20 HTTP/1.1")
    assert b"Bearer vllm" in head
    assert b"Bearer client" not in head
    assert b"X-Mine: 1" in head


async def test_a_connection_that_closes_is_tried_once_more() -> None:
    """vLLM closes idle ones at the moment in which they are used; after that it is not there."""
    async with raw_server(None, reply(b"ok")) as server, vllm_client(server.url) as client:
        response = await client.send("POST", "/v1/a", headers={}, body=b"x")
        assert (response.status, await response.read()) == (200, b"ok")
        assert len(server.requests) == 2
    async with raw_server(None) as server, vllm_client(server.url) as client:
        with pytest.raises(UpstreamError, match="Server disconnected"):
            await client.send("POST", "/v1/a", headers={}, body=b"x")
        assert len(server.requests) == 2


async def test_one_that_took_a_request_is_not_one_that_did_not() -> None:
    """A request that vLLM may be computing is not sent to another one."""
    async with raw_server(b"") as server, vllm_client(server.url, read_timeout_s=0.05) as client:
        with pytest.raises(TimeoutError):
            await client.send("POST", "/v1/a", headers={}, body=b"x")
    async with vllm_client(f"http://127.0.0.1:{await unused_port()}") as client:
        with pytest.raises(UpstreamError):
            await client.send("POST", "/v1/a", headers={}, body=b"x")


async def test_a_whole_answer_takes_the_time_to_its_first_token(vllm: FakeVllm) -> None:
    vllm.behaviour.token_s = 0.02
    async with vllm_client(vllm.url) as client:
        assert await client.complete(COMPLETION, headers={"X-Mine": "1"}) > 0
    assert vllm.generated[0].headers["X-Mine"] == "1"
    assert vllm.generated[0].body == COMPLETION


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (reply(b"data: [DONE]\n\n", status="400 Bad Request"), "it was not answered, status 400"),
        (reply(b"data: {}\n\n"), "it was not answered, status 200"),
        (reply(b"data: {}\n\n", length=99), "Response payload is not completed"),
        (reply(b""), "it was not answered"),
    ],
    ids=["refused", "without its end", "half", "nothing"],
)
async def test_half_a_completion_is_no_measurement(answer: bytes, problem: str) -> None:
    async with raw_server(answer) as server, vllm_client(server.url) as client:
        with pytest.raises(UpstreamError, match=problem):
            await client.complete(COMPLETION, headers={})


async def test_a_kvshare_server_is_no_vllm() -> None:
    """A request could go round between two of them."""
    own = reply(b"{}", headers="Server: kvshare\r\n")
    async with raw_server(own) as server, vllm_client(server.url) as client:
        with pytest.raises(WrongServerError, match="url must be that of a vLLM"):
            await client.check_health()
