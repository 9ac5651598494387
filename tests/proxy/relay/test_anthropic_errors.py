"""Below /v1/messages vLLM's errors are in Anthropic's shape, types and words; elsewhere they are vLLM's."""

from __future__ import annotations

import json
import logging
from typing import Any

import anthropic
import pytest

from proxy.relay.anthropic_errors import ErrorEvents, reply_of
from tests.fake_vllm import FakeVllm
from tests.proxy.relay.relay_server import Relay

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}


def openai_shape(message: str, kind: str = "BadRequestError", code: int = 400, **extra: object) -> bytes:
    """As vLLM 0.32 writes an error of its own validation."""
    error = {"message": message, "type": kind, "param": None, "code": code, **extra}
    return json.dumps({"error": error}).encode()


def anthropic_shape(message: str, kind: str) -> bytes:
    """As vLLM 0.32 writes errors that its Messages API found."""
    return json.dumps({"type": "error", "error": {"type": kind, "message": message}}).encode()


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("status", "raw", "kind", "message"),
    [
        (400, openai_shape("no", "Bad Request"), "invalid_request_error", "no"),
        (400, anthropic_shape("no", "BadRequestError"), "invalid_request_error", "no"),
        (404, anthropic_shape("gone", "NotFoundError"), "not_found_error", "gone"),
        (404, b'{"detail": "Not Found"}', "not_found_error", "Not Found"),
        (405, b'{"detail": "Method Not Allowed"}', "invalid_request_error", "Method Not Allowed"),
        (401, b'{"error": "Unauthorized"}', "authentication_error", "Unauthorized"),
        (413, openai_shape("big", code=413), "request_too_large", "big"),
        (422, openai_shape("odd", "UnprocessableEntityError", 422), "invalid_request_error", "odd"),
        (429, openai_shape("busy", "TooManyRequests", 429), "rate_limit_error", "busy"),
        (500, openai_shape("bang", "InternalServerError", 500), "api_error", "bang"),
        (501, openai_shape("never", "NotImplementedError", 501), "api_error", "never"),
        (503, openai_shape("asleep", "ServiceUnavailableError", 503), "overloaded_error", "asleep"),
        (500, b"Internal Server Error", "api_error", "The model server answered with status 500."),
        (400, b"[]", "invalid_request_error", "The model server answered with status 400."),
        (400, b'{"error": null}', "invalid_request_error", "The model server answered with status 400."),
        (400, b"", "invalid_request_error", "The model server answered with status 400."),
    ],
)
async def test_an_error_of_vllm_is_told_as_anthropic_would(
    relay: Relay, vllm: FakeVllm, path: str, status: int, raw: bytes, kind: str, message: str
) -> None:
    """Status and other headers stay; `request_id` is the header's."""
    vllm.behaviour.status, vllm.behaviour.error = status, raw
    vllm.behaviour.headers = {"Retry-After": "7"}
    response = await relay.send(path, ASK)
    assert response.status == status
    assert response.content_type == "application/json"
    assert response.headers["Retry-After"] == "7"
    assert await response.json() == {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": response.headers["request-id"],
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_elsewhere_the_error_is_vllms(relay: Relay, vllm: FakeVllm, path: str) -> None:
    """Byte for byte."""
    vllm.behaviour.status, vllm.behaviour.error = 400, openai_shape("no")
    response = await relay.send(path, ASK | {"prompt": "a", "input": "a"})
    assert (response.status, await response.read()) == (400, openai_shape("no"))


LIMIT = "This model's maximum context length is 4096 tokens. However, "


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            f"{LIMIT}your prompt contains 5000 input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            f"{LIMIT}your prompt contains at least 4097 input tokens, which exceeds this limit even without "
            "any output tokens. Please reduce the length of the input prompt.",
            "prompt is too long: at least 4097 tokens > 4096 maximum",
        ),
        (
            f"{LIMIT}your prompt contains 900000 characters (more than 65536 characters, which is the upper "
            "bound for 4096 input tokens). Please reduce the length of the input prompt.",
            "prompt is too long: more than 4096 tokens > 4096 maximum (900000 characters)",
        ),
        (
            f"{LIMIT}you requested 100 output tokens and your prompt contains 4000 input tokens, for a total "
            "of 4100 tokens. Please reduce the length of the input prompt or the number of requested output.",
            "input length and `max_tokens` exceed context limit: 4000 + 100 > 4096, decrease input length or "
            "`max_tokens` and try again",
        ),
        (
            f"{LIMIT}you requested 100 output tokens and your prompt contains at least 3997 input tokens, "
            "for a total of at least 4097 tokens.",
            "input length and `max_tokens` exceed context limit: at least 3997 + 100 > 4096, decrease input ",
        ),
        (
            "max_tokens=5000 cannot be greater than max_model_len=4096. Please request fewer output tokens.",
            "max_tokens: 5000 > 4096, which is the maximum allowed number of output tokens",
        ),
        (
            "The decoder prompt (length 5000) is longer than the maximum model length of 4096. Make sure",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "The decoder prompt (length 4096) plus the number of requested output tokens (at least 1) is "
            "longer than the maximum model length of 4096. Make sure that",
            "prompt is too long: 4096 tokens > 4096 maximum",
        ),
        (
            "Input length (5000) exceeds model's maximum context length (4096).",
            "prompt is too long: 5000 tokens > 4096 maximum",
        ),
        (
            "2 validation errors:\n  {'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', "
            "'input': {}}\n  {'type': 'greater_than', 'loc': 'body.max_tokens', 'msg': \"It isn't above 0\", "
            "'input': 0, 'ctx': {'error': ValueError('x')}}",
            "messages: Field required; max_tokens: It isn't above 0",
        ),
        ("Something else about 5 tokens.", "Something else about 5 tokens."),
    ],
)
@pytest.mark.parametrize("shape", [openai_shape, lambda message: anthropic_shape(message, "BadRequestError")])
def test_what_does_not_fit_is_said_in_the_words_that_agents_know(shape: Any, said: str, told: str) -> None:
    """In whichever shape and words vLLM says it; numbers that are bounds stay bounds."""
    assert reply_of(400, shape(said)).message.startswith(told)


async def test_the_client_raises_what_it_raises_for_anthropic(relay: Relay, vllm: FakeVllm) -> None:
    """The anthropic package reads type and message."""
    vllm.behaviour.status = 400
    vllm.behaviour.error = openai_shape(
        "The decoder prompt (length 9) is longer than the maximum model length of 8."
    )
    async with anthropic.AsyncAnthropic(base_url=relay.url, api_key="none", max_retries=0) as client:
        with pytest.raises(
            anthropic.BadRequestError, match="prompt is too long: 9 tokens > 8 maximum"
        ) as caught:
            await client.messages.create(**ASK)
    assert caught.value.type == "invalid_request_error"


def error_event(message: str, kind: str = "internal_error") -> bytes:
    document = {"type": "error", "error": {"type": kind, "message": message}}
    return f"event: error\ndata: {json.dumps(document)}\n\n".encode()


PING = b'event: ping\ndata: {"type": "ping"}\n\n'
DELTA = b'event: content_block_delta\ndata: {"delta": {"text": "event: error\\n\\n"}}\n\n'


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("said", "kind", "message"),
    [
        (error_event("boom"), "api_error", "boom"),
        (error_event("no", "BadRequestError"), "invalid_request_error", "no"),
        (error_event("gone", "NotFoundError"), "not_found_error", "gone"),
        (
            error_event(f"{LIMIT}your prompt contains 5000 input tokens, which"),
            "api_error",
            "prompt is too long: ",
        ),
        (b"event: error\ndata: broken\n\n", "api_error", "The model server failed."),
    ],
)
def test_an_error_within_a_stream_is_told_as_anthropic_would(
    said: bytes, kind: str, message: str, size: int
) -> None:
    """However the stream is cut into pieces; every other byte stays."""
    events, stream, out = ErrorEvents("req-1"), PING + DELTA + said + PING, b""
    for start in range(0, len(stream), size):
        out += events.feed(stream[start : start + size])
    out += events.flush()
    assert out.startswith(PING + DELTA)
    assert out.endswith(PING)
    name, data = out.removeprefix(PING + DELTA).removesuffix(PING).split(b"\n", 1)
    document = json.loads(data.removeprefix(b"data: "))
    assert (name, document["type"], document["request_id"]) == (b"event: error", "error", "req-1")
    assert document["error"]["type"] == kind
    assert document["error"]["message"].startswith(message)


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize(
    "stream", [PING + DELTA, DELTA[:-1], b"event: err", b"event: error\ndata: {", b"\n\n\n", b""]
)
def test_a_stream_without_an_error_stays_as_it_is(stream: bytes, size: int) -> None:
    """Also one that breaks off."""
    events = ErrorEvents("req-1")
    out = b"".join(events.feed(stream[start : start + size]) for start in range(0, len(stream), size))
    assert out + events.flush() == stream


async def test_an_error_in_a_relayed_stream(relay: Relay, vllm: FakeVllm) -> None:
    """The client raises for it; on other routes the stream is vLLM's."""
    vllm.behaviour.interjects = error_event("boom")
    async with anthropic.AsyncAnthropic(base_url=relay.url, api_key="none", max_retries=0) as client:
        with pytest.raises(anthropic.APIStatusError, match="boom") as caught:
            async for _ in await client.messages.create(**ASK, stream=True):
                pass
    assert caught.value.type == "api_error"
    response = await relay.send("/v1/chat/completions", ASK | {"stream": True})
    assert error_event("boom") in await response.read()


@pytest.mark.parametrize("path", [MESSAGES, "/v1/chat/completions"])
@pytest.mark.parametrize("kind", ["BadRequestError", "Bad Request"])
async def test_the_log_names_the_type_of_a_relayed_error(
    relay: Relay, vllm: FakeVllm, path: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without its message, which may quote the prompt."""
    caplog.set_level(logging.INFO, logger="proxy.middleware")
    vllm.behaviour.status, vllm.behaviour.error = 400, openai_shape("SECRET", kind, param="SECRET text")
    await relay.send(path, ASK)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "proxy.middleware"]
    assert f"error={kind.replace(' ', '_')} " in line
    assert f"of type '{kind}'" in line
    assert "SECRET" not in caplog.text
