"""What the front says of itself, and what it answers to bytes that are no request."""

from __future__ import annotations

import asyncio
import json

import pytest
from yarl import URL

from tests.proxy.conftest import Server, chat


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/nothing", "/metrics", "/admin/stats"])
async def test_no_answer_names_versions(server: Server, path: str) -> None:
    """The header Server is a name, of answers and refusals alike."""
    assert (await server.get(path)).headers.getall("Server") == ["kvshare"]


async def test_streams_name_no_versions(server: Server) -> None:
    """Of a stream it goes out before the first event."""
    response = await server.post("/v1/chat/completions", chat(stream=True))
    assert response.headers["Server"] == "kvshare"


@pytest.mark.parametrize(
    "raw",
    [
        b"\0\1\2\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nX-Secret: " + b"x" * 99_999 + b"\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nX-Se cret: SECRET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: SECRET\r\n\r\n",
    ],
    ids=["no HTTP", "unknown version", "endless header", "no header", "no length"],
)
async def test_bytes_that_are_no_request(server: Server, raw: bytes) -> None:
    """An error object without these bytes, by nobody's version, and a closed connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(server.url).port)
    writer.write(raw)
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    status, *headers = head.decode().split("\r\n")
    assert status.startswith(("HTTP/1.1 400 ", "HTTP/1.0 400 "))
    assert "Server: kvshare" in headers
    assert not any("aiohttp" in header or "Python" in header for header in headers)
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "bad_request")
    assert b"SECRET" not in body
