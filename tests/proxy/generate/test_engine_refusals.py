"""What the engine refuses: its errors have a status, and the stream has not begun."""

from __future__ import annotations

import asyncio

import pytest

from kvshare.errors import ContextLengthError, EngineError, ErrorCode, OverloadedError, RequestError
from tests.proxy.conftest import Server, chat, running_server
from tests.proxy.fake_engine import Behaviour
from tests.proxy.generate.refusals import CHAT, TEXT, check_refused


@pytest.mark.parametrize(("path", "param"), [(CHAT, "messages"), (TEXT, "prompt")])
@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_a_prompt(server: Server, path: str, param: str, stream: bool) -> None:
    """The context length is checked before a stream begins, so the status is a real 400."""
    text = "x" * 2000
    response = await server.post(path, chat(text) | {"prompt": text, "stream": stream})
    message = await check_refused(server, response, param=param, code="context_length_exceeded")
    assert "1000 tokens" in message


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
