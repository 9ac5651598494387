"""Every error on Anthropic's routes has Anthropic's shape, and says what is wrong."""

from __future__ import annotations

from typing import Any

import aiohttp
import anthropic
import pytest

from kvshare.errors import ContextLengthError, EngineError, OverloadedError, ShuttingDownError
from tests.proxy.conftest import Server, running_server
from tests.proxy.fake_engine import Behaviour

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ASK: dict[str, Any] = {
    "model": "echo",
    "max_tokens": 400,
    "messages": [{"role": "user", "content": "hello"}],
}
TOOL = {"name": "time", "input_schema": {"type": "object"}}
CALL = {"type": "tool_use", "id": "t1", "name": "time", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "noon"}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x"}}


async def error_of(response: aiohttp.ClientResponse) -> dict[str, str]:
    """The error of an answer in Anthropic's shape, which is checked."""
    body = await response.json()
    assert body.keys() == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["error"].keys() == {"type", "message"}
    assert body["request_id"] == response.headers["request-id"] == response.headers["X-Request-Id"]
    error: dict[str, str] = body["error"]
    return error


def said(*content: object, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": []}]}, "messages"),
        (said("hello"), "messages[0].content[0]"),
        (said({"type": "text"}), "messages[0].content[0].text"),
        (said({"text": "no type"}), "messages[0].content[0]"),
        (said(IMAGE), "messages[0].content[0]"),
        (said({"type": "document"}), "messages[0].content[0]"),
        (said(CALL), "messages[0].content[0]"),
        (said(RESULT, role="assistant"), "messages[0].content[0]"),
        (said(RESULT), "messages[0].content[0].tool_use_id"),
        (said(CALL, role="assistant"), "messages"),
        (said({**CALL, "input": "{}"}, role="assistant"), "messages[0].content[0].input"),
        ({"system": 3}, "system"),
        ({"system": [IMAGE]}, "system[0]"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"tools": [{"name": "time"}]}, "tools[0].input_schema"),
        ({"tools": [{**TOOL, "name": "two words"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 1025}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "name": "time"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"container": "c1"}, "container"),
        ({"mcp_servers": [{"url": "http://x"}]}, "mcp_servers"),
        ({"model": None}, "model"),
        ({"kvshare": {"mode": "bold"}}, "kvshare.mode"),
    ],
)
async def test_bad_input_names_the_field(server: Server, change: dict[str, Any], field: str) -> None:
    """What cannot be read is a 400 that names the field, and nothing is generated."""
    response = await server.post(MESSAGES, {**ASK, **change})
    assert response.status == 400
    error = await error_of(response)
    assert error["type"] == "invalid_request_error"
    assert f"'{field}'" in error["message"]
    assert not server.engine.requests


@pytest.mark.parametrize(
    ("path", "change", "field"),
    [
        (MESSAGES, {"system": 3}, "system"),
        (MESSAGES, {"messages": [{"role": "user", "content": {}}]}, "messages[0].content"),
        (MESSAGES, {"messages": [{"role": "assistant", "content": 3}]}, "messages[0].content"),
        ("/v1/responses", {"input": 3}, "input"),
        ("/v1/responses", {"input": [{"role": "user", "content": 3}]}, "input[0].content"),
    ],
)
async def test_where_text_may_stand_for_a_list_both_are_named(
    server: Server, path: str, change: dict[str, Any], field: str
) -> None:
    """Of what was expected nothing is left out."""
    error = (await (await server.post(path, {**ASK, **change})).json())["error"]
    assert error["message"].startswith(f"Invalid '{field}': expected a string or a list, got ")


async def test_images_are_refused_clearly(server: Server) -> None:
    """The message says what was found and what is read."""
    error = await error_of(await server.post(MESSAGES, {**ASK, **said(IMAGE)}))
    assert "got 'image'" in error["message"]
    assert "no images" in error["message"]


@pytest.mark.parametrize("raw", [b"{", b"[]", b'"x"', b"\xff", b'{"model": NaN}', b"[" * 100_000])
async def test_what_is_no_object_is_400(server: Server, raw: bytes) -> None:
    """Bytes that are no JSON object are refused in the same shape."""
    response = await server.post(MESSAGES, raw)
    assert response.status == 400
    assert (await error_of(response))["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_another_model_is_404(server: Server, path: str) -> None:
    """The client raises its own class for a model that is not served."""
    response = await server.post(path, {**ASK, "model": "claude"})
    assert response.status == 404
    assert (await error_of(response))["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("path", "method", "status", "error_type"),
    [
        ("/v1/messages/batches", "POST", 404, "not_found_error"),
        ("/v1/messages", "GET", 405, "invalid_request_error"),
    ],
)
async def test_routes_that_are_not_there(
    server: Server, path: str, method: str, status: int, error_type: str
) -> None:
    """What is not served of the API is refused in its shape."""
    response = await server.http.request(method, server.url + path, json={})
    assert response.status == status
    assert (await error_of(response))["type"] == error_type


async def test_a_missing_key_is_401(guarded: Server) -> None:
    """The client raises its own class for a key that is not known."""
    async with guarded.anthropic("sk-unknown") as client:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            await client.messages.create(**ASK)
    assert caught.value.type == "authentication_error"
    assert "x-api-key" in caught.value.message


async def test_a_large_body_is_413() -> None:
    """The limit of the body's size holds here, too."""
    async with running_server(server__max_body_bytes=1000) as server:
        response = await server.post(MESSAGES, {**ASK, **said({"type": "text", "text": "x" * 2000})})
        assert response.status == 413
        assert (await error_of(response))["type"] == "request_too_large"


async def test_another_content_type_is_415(server: Server) -> None:
    """Only JSON is read."""
    response = await server.post(MESSAGES, ASK, **{"Content-Type": "text/plain"})
    assert response.status == 415
    assert (await error_of(response))["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("num_characters", "words"),
    [
        (2000, "prompt is too long: 2006 tokens > 1000 maximum"),
        (900, "input length and `max_tokens` exceed context limit: 906 + 400 > 1000"),
    ],
)
async def test_what_does_not_fit(server: Server, num_characters: int, words: str) -> None:
    """It is said in the words by which coding agents know what to make shorter."""
    response = await server.post(MESSAGES, {**ASK, **said({"type": "text", "text": "x" * num_characters})})
    assert response.status == 400
    error = await error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(words)


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
async def test_a_bound_is_called_a_bound(path: str) -> None:
    """A prompt that was not counted to its end has at least so many tokens, also where they are counted."""
    too_long = ContextLengthError(num_prompt_tokens=21605, max_tokens=1, max_model_len=1000, is_bound=True)
    async with running_server(Behaviour(refuse_prompt=too_long)) as server:
        body = {name: value for name, value in ASK.items() if path == MESSAGES or name != "max_tokens"}
        response = await server.post(path, body)
        error = await error_of(response)
    assert (response.status, error["type"]) == (400, "invalid_request_error")
    assert error["message"] == "prompt is too long: at least 21605 tokens > 1000 maximum"


@pytest.mark.parametrize(
    ("refusal", "status", "error_type"),
    [
        (OverloadedError("The queue is full."), 429, "rate_limit_error"),
        (ShuttingDownError("It stops."), 503, "overloaded_error"),
        (EngineError("It fell over."), 500, "api_error"),
        (RuntimeError("SECRET"), 500, "api_error"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses(
    refusal: Exception, status: int, error_type: str, stream: bool
) -> None:
    """Before the first byte an error has its own status, streaming or not."""
    async with running_server(Behaviour(refuse=refusal)) as server:
        response = await server.post(MESSAGES, {**ASK, "stream": stream})
        assert response.status == status
        error = await error_of(response)
        assert error["type"] == error_type
        assert "SECRET" not in error["message"]


async def test_while_loading_it_is_overloaded() -> None:
    """A server whose engine is not up yet says so with 503."""
    async with running_server(Behaviour(start_s=30), wait=False) as server:
        response = await server.post(MESSAGES, ASK)
        assert response.status == 503
        assert (await error_of(response))["type"] == "overloaded_error"


async def test_other_routes_keep_openais_shape(server: Server) -> None:
    """The shape follows the route, not the client."""
    response = await server.post("/v1/chat/completions", {}, **{"anthropic-version": "2023-06-01"})
    assert (await response.json()).keys() == {"error"}
    assert "request-id" not in response.headers
