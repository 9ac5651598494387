"""What the front says of itself, and what it answers to bytes that are no request."""

from __future__ import annotations

import asyncio

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


async def test_bytes_that_are_no_request(server: Server) -> None:
    """By nobody's version, and a closed connection; `test_connection.py` says what is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(server.url).port)
    writer.write(b"\0\1\2\r\n\r\n")
    head, _, _ = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    headers = head.decode().split("\r\n")
    assert "Server: kvshare" in headers
    assert not any("aiohttp" in header or "Python" in header for header in headers)
