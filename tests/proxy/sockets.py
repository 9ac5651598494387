"""Bare sockets to a server."""

from __future__ import annotations

import asyncio

from yarl import URL

CHAT = "/v1/chat/completions"
HEAD = "POST {path} HTTP/{version}\r\nHost: a\r\nContent-Type: application/json\r\n"


async def connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", URL(url).port)


async def all_of(url: str, raw: bytes) -> tuple[int, str]:
    """Status and body of an answer behind which the connection is closed."""
    reader, writer = await connect(url)
    writer.write(raw)
    head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body.decode()
