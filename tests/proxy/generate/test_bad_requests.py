"""Requests that are wrong before their values are read: size, type, route, connection."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from yarl import URL

from tests.proxy.conftest import Server, chat
from tests.proxy.generate.refusals import CHAT, check_refused


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
