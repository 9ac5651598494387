"""
Whatever a client sends, it gets an OpenAI error object with the right status; nothing is stored and the
server lives.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from kvshare.errors import ContextLengthError, EngineError, ErrorCode, OverloadedError, RequestError
from tests.proxy.conftest import Server, chat, running_server
from tests.proxy.fake_engine import Behaviour

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


async def check_refused(
    server: Server,
    response: aiohttp.ClientResponse,
    *,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
    kind: str = "invalid_request_error",
) -> str:
    """The error's shape and values, that nothing was kept, and that the server goes on; gives the message."""
    assert response.content_type == "application/json"
    document = json.loads(await response.read())
    assert document.keys() == {"error"}
    error = document["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (response.status, error["param"], error["code"], error["type"]) == (status, param, code, kind)
    assert error["message"]
    assert response.headers["X-Request-Id"]
    assert not any(server.engine.stored.values())
    assert (await server.get("/health")).status == 200
    return str(error["message"])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b'{"model": "echo",}',
        b"[]",
        b'"text"',
        b"null",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"model": NaN}',
        b'{"temperature": -Infinity}',
        b'{"seed": ' + b"9" * 5000 + b"}",
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
)
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_what_is_no_json_object_is_refused(server: Server, path: str, body: bytes) -> None:
    """Malformed, deep, non-finite or non-UTF-8 JSON is a 400."""
    await check_refused(server, await server.post(path, body))


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hello"]}, "messages[0]"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "assistant", "function_call": "f"}]}, "messages[0].function_call"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "wizard", "content": "a"}]}, "messages[0].role"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 9}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {str(number): 1 for number in range(1025)}}, "logit_bias"),
        ({"kvshare": {str(number): 1 for number in range(17)}}, "kvshare"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"kvshare": "off"}, "kvshare"),
        ({"kvshare": {"mode": "always"}}, "kvshare.mode"),
        ({"kvshare": {"no_store": 1}}, "kvshare.no_store"),
    ],
)
async def test_wrong_values_name_their_parameter(
    server: Server, extra: dict[str, object], param: str
) -> None:
    """A wrong type or range is a 400 that says which parameter and what is expected."""
    response = await server.post(CHAT, json.dumps(chat() | extra).encode())
    await check_refused(server, response, param=param)


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"max_tokens": 2**31}, "max_tokens", "from 1 to 2147483647, or -1 for no limit, got 2147483648"),
        ({"max_tokens": 0}, "max_tokens", "from 1 to 2147483647, or -1 for no limit, got 0"),
        ({"max_completion_tokens": 2**40}, "max_completion_tokens", "to 2147483647"),
        ({"top_k": 2**31}, "top_k", "at most 2147483647, got 2147483648"),
        ({"min_tokens": 2**31}, "min_tokens", "at most 2147483647, got 2147483648"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids[0]", "at most 2147483647, got 2147483648"),
        ({"logit_bias": {"-1": 1}}, "logit_bias", "got '-1'"),
        ({"logit_bias": {"5": 1, "1.5": 1}}, "logit_bias", "got '1.5'"),
        ({"logit_bias": {"": 1}}, "logit_bias", "got ''"),
        (
            {"logit_bias": {str(2**31): 1}},
            "logit_bias",
            "from 0 to 2147483647 as keys, such as '50256', got '2147",
        ),
        ({"logit_bias": {"x" * 500: 1}}, "logit_bias", f"got '{'x' * 40}'"),
    ],
)
async def test_the_bounds_and_what_was_found_are_in_the_message(
    server: Server, extra: dict[str, object], param: str, words: str
) -> None:
    """Who reads the error learns both ends of a range, and which key or number was wrong."""
    response = await server.post(CHAT, chat() | extra)
    message = await check_refused(server, response, param=param)
    assert words in message


@pytest.mark.parametrize("extra", [{"user": "\ud800"}, {"\udfff": 1}, {"messages": ["a\ud83d"]}])
async def test_lone_surrogates_are_refused(server: Server, extra: dict[str, object]) -> None:
    """Half a character is no text, wherever it stands; both halves are."""
    await check_refused(server, await server.post(CHAT, json.dumps(chat() | extra).encode()))
    response = await server.post(CHAT, json.dumps(chat("\U0001f600")).encode())
    assert (await response.json())["choices"][0]["message"]["content"] == "\U0001f600"


async def test_unknown_kvshare_keys_are_refused(server: Server) -> None:
    """The kvshare object is ours: a key that is not understood is not ignored."""
    response = await server.post(CHAT, chat(kvshare={"mode": "off", "scope": "public"}))
    await check_refused(server, response, param="kvshare.scope", code="unknown_parameter")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("web_search_options", {}),
        ("length_penalty", True),
        ("use_beam_search", True),
        ("guided_regex", "a+"),
        ("chat_template", "{{ messages }}"),
        ("truncate_prompt_tokens", 5),
    ],
)
async def test_what_would_change_the_answer_is_not_ignored(server: Server, name: str, value: object) -> None:
    """A parameter that is not implemented is refused by name, with the way out."""
    response = await server.post(CHAT, chat(**{name: value}))
    message = await check_refused(server, response, param=name, code="unsupported_parameter")
    assert "--engine vllm" in message


async def test_spoken_messages_are_refused(server: Server) -> None:
    """What an assistant said aloud is on OpenAI's servers only."""
    messages = [{"role": "assistant", "content": None, "audio": {"id": "1"}}]
    response = await server.post(CHAT, chat() | {"messages": messages})
    await check_refused(server, response, param="messages[0].audio", code="unsupported_parameter")


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [[1], [1.5]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": "b"}}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": [256]}, "prompt"),
        ({"prompt": [2**31]}, "prompt"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "messages": 5, "max_tokens": -2}, "max_tokens"),
    ],
)
async def test_wrong_prompts_are_refused(server: Server, extra: dict[str, object], param: str) -> None:
    """A prompt is text or token ids, or a list of either, and not empty."""
    response = await server.post(TEXT, json.dumps({"model": "echo"} | extra).encode())
    await check_refused(server, response, param=param)


@pytest.mark.parametrize(
    ("param", "extra"),
    [("echo", {"echo": True, "logprobs": 0}), ("suffix", {"suffix": "x"}), ("best_of", {"best_of": 2})],
)
async def test_completion_extras_are_refused(server: Server, param: str, extra: dict[str, object]) -> None:
    """echo with logprobs, suffix and best_of beyond n are not implemented and say so."""
    response = await server.post(TEXT, {"model": "echo", "prompt": "a", **extra})
    await check_refused(server, response, param=param, code="unsupported_parameter")


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_unknown_model(server: Server, path: str) -> None:
    """Another model's name is a 404 with OpenAI's code, and with the name that is served."""
    response = await server.post(path, chat() | {"prompt": "a", "model": "gpt-9"})
    message = await check_refused(server, response, status=404, param="model", code="model_not_found")
    assert "The model 'gpt-9' is not served here: expected 'echo'." in message


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (TEXT, "prompt")])
@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_a_prompt(server: Server, path: str, param: str, stream: bool) -> None:
    """The context length is checked before a stream begins, so the status is a real 400."""
    text = "x" * 2000
    response = await server.post(path, chat(text) | {"prompt": text, "stream": stream})
    message = await check_refused(server, response, param=param, code="context_length_exceeded")
    assert "1000 tokens" in message


async def test_the_client_sees_typed_errors(server: Server) -> None:
    """The openai client turns the statuses and codes into its own exceptions."""
    async with server.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="echo", messages=[])
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="a")
    assert caught.value.param == "messages"


async def test_large_bodies_are_refused(server: Server) -> None:
    """10 MB is a 413, also when it comes in chunks or grows out of a small compressed body."""
    large = json.dumps(chat("x" * 10_000_000)).encode()
    too_large: dict[str, Any] = {"status": 413, "code": "request_too_large"}
    await check_refused(server, await server.post(CHAT, large), **too_large)

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(large), 1 << 16):
            yield large[start : start + (1 << 16)]

    async with server.http.post(
        server.url + CHAT, data=pieces(), headers={"Content-Type": "application/json"}
    ) as response:
        await response.read()
        await check_refused(server, response, **too_large)
    bomb = await server.post(CHAT, gzip.compress(large), **{"Content-Encoding": "gzip"})
    await check_refused(server, bomb, **too_large)


async def test_a_large_body_within_the_limit_is_read(server: Server) -> None:
    """aiohttp's own limit of 1 MiB does not apply: 2 MB reach the engine, which finds them too long."""
    response = await server.post(CHAT, chat("x" * 2_000_000))
    await check_refused(server, response, param="messages", code="context_length_exceeded")


async def test_bodies_must_say_that_they_are_json(server: Server) -> None:
    """What a web page can send without asking, a form or plain text, is refused."""
    for content_type in ("text/plain", "application/x-www-form-urlencoded"):
        response = await server.post(CHAT, json.dumps(chat()).encode(), **{"Content-Type": content_type})
        message = await check_refused(server, response, status=415, code="unsupported_media_type")
        assert message == f"Send the body with 'Content-Type: application/json', not '{content_type[:40]}'."


async def test_unknown_routes_and_methods_answer_in_json(server: Server) -> None:
    """404 and 405 have the error shape too."""
    missing: dict[str, Any] = {"status": 404, "code": "not_found"}
    await check_refused(server, await server.get("/v1/unknown"), **missing)
    await check_refused(server, await server.get("/nothing"), **missing)
    not_allowed: dict[str, Any] = {"status": 405, "code": "method_not_allowed"}
    response = await server.post("/health", {})
    message = await check_refused(server, response, **not_allowed)
    assert message == "This route does not take POST: expected GET, HEAD."
    assert response.headers["Allow"] == "GET, HEAD"
    response = await server.get(CHAT)
    assert "does not take GET: expected POST." in await check_refused(server, response, **not_allowed)
    assert response.headers["Allow"] == "POST"


async def test_an_unknown_route_is_answered_with_those_that_exist(server: Server) -> None:
    """A client whose base URL lacks /v1, the usual mistake, reads the route that it meant; none of /admin."""
    response = await server.post("/chat/completions", chat())
    message = await check_refused(server, response, status=404, code="not_found")
    assert "Did you mean POST /v1/chat/completions?" in message
    assert "It has: " in message
    assert "GET /v1/models" in message
    assert "/admin" not in message
    response = await server.get("/" + "z" * 5000)
    assert "Did you mean" not in await check_refused(server, response, status=404, code="not_found")


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "param"),
    [
        (OverloadedError("full"), 429, "rate_limit_error", "queue_full", None),
        (EngineError("broken"), 500, "server_error", "engine_error", None),
        (RuntimeError("SECRET"), 500, "server_error", "engine_error", None),
        (
            RequestError("bad", param="seed", code=ErrorCode.BAD_REQUEST),
            400,
            "invalid_request_error",
            "bad_request",
            "seed",
        ),
        (
            ContextLengthError(num_prompt_tokens=1, max_tokens=1, max_model_len=1),
            400,
            "invalid_request_error",
            "context_length_exceeded",
            "messages",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_refuses(
    error: Exception, status: int, kind: str, code: str, param: str | None, stream: bool
) -> None:
    """What an engine raises before it starts keeps its own status, streamed or not, and hides its insides."""
    async with running_server(Behaviour(refuse=error)) as server:
        response = await server.post(CHAT, chat(stream=stream))
        message = await check_refused(server, response, status=status, kind=kind, code=code, param=param)
    assert "SECRET" not in message
    assert ("Retry-After" in response.headers) == (status == 429)


async def test_a_full_queue_is_429() -> None:
    """More requests than slots and queue hold get 429 with Retry-After; the others are served."""
    async with running_server(Behaviour(token_s=0.06, max_running=1, max_waiting=1)) as server:
        replies = await asyncio.gather(*(server.post(CHAT, chat()) for _ in range(4)))
    assert sorted(reply.status for reply in replies) == [200, 200, 429, 429]
    refused = next(reply for reply in replies if reply.status == 429)
    assert refused.headers["Retry-After"] == "1"
    assert refused.headers["retry-after-ms"] == "1000"


async def say(server: Server, *pieces: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a bare connection and send bytes."""
    port = URL(server.url).port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(pieces))
    await writer.drain()
    return reader, writer


STALLED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n",
    b"Content-Length: 100\r\n\r\n{",
)


async def test_a_body_that_does_not_come_is_408(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that stalls within its body is told so and loses its connection."""
    monkeypatch.setattr("proxy.request_body.BODY_TIMEOUT_S", 0.05)
    reader, writer = await say(server, *STALLED)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 1)
    assert head.startswith(b"HTTP/1.1 408 ")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "pieces",
    [
        STALLED,
        (b"\0\1\2\r\n\r\n",),
        (b"GET / HTTP/9.9\r\n\r\n",),
        (b"GET /v1/models HTTP/1.1\r\nX: ", b"x" * 99_999),
    ],
    ids=["half a body", "no HTTP", "unknown version", "endless header"],
)
async def test_broken_connections_leave_the_server_alive(
    server: Server, pieces: tuple[bytes, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Bytes that never become a request cost one connection and no line of error."""
    _, writer = await say(server, *pieces)
    await asyncio.sleep(0.02)
    writer.transport.abort()
    assert (await server.post(CHAT, chat())).status == 200
    assert "failed" not in caplog.text


async def test_a_schema_that_is_nested_too_deeply_is_refused(server: Server) -> None:
    """Just before the parser gives up, what writes the schema again does: no depth is a failure."""
    for depth in range(850, 1000):
        schema = '{"a":' * depth + "1" + "}" * depth
        function = f'{{"name": "f", "parameters": {schema}}}'
        tools = f'[{{"type": "function", "function": {function}}}]'
        body = f'{json.dumps(chat(tool_choice="required"))[:-1]}, "tools": {tools}}}'
        assert (await server.post(CHAT, body.encode())).status in (200, 400)


TEXTS = st.text(max_size=8) | st.sampled_from(["echo", "user", "text", "off", "\0", "\ud800", "1e999"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        *("model", "messages", "prompt", "max_tokens", "n", "stop", "stream", "stream_options", "logprobs"),
        *("logit_bias", "temperature", "seed", "kvshare", "tools", "response_format", "best_of", "echo"),
        *("top_logprobs", "tool_choice", "functions", "function_call", "guided_json", "structured_outputs"),
        *("top_k", "stop_token_ids", "chat_template_kwargs", "reasoning_effort", "continue_final_message"),
        *("input", "dimensions", "encoding_format", "tokens", "return_token_strs"),
    ]
)
BODIES = st.builds(
    lambda base, extra: base | extra,
    st.sampled_from([{}, chat(), {"model": "echo", "prompt": "a", "input": "a", "tokens": [97]}]),
    st.dictionaries(NAMES | TEXTS, VALUES, max_size=4),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=BODIES, path=st.sampled_from([CHAT, TEXT, "/v1/embeddings", "/tokenize", "/detokenize"]))
async def test_fuzzed_bodies_never_break_the_server(server: Server, body: object, path: str) -> None:
    """Any JSON object is answered or refused with an error object; never a 5xx."""
    response = await server.post(path, json.dumps(body).encode())
    text = await response.text()
    assert response.status in (200, 400, 404), text
    if response.status != 200:
        assert json.loads(text)["error"].keys() == {"message", "type", "param", "code"}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=64))
async def test_fuzzed_bytes_never_break_the_server(server: Server, body: bytes) -> None:
    """Bytes that are no JSON object are a 400."""
    response = await server.post(CHAT, body)
    assert response.status == 400
