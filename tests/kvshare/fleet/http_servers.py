"""Servers of one answer each, as no vLLM should give it: raw bytes on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def reply(body: bytes, *, status: str = "200 OK", headers: str = "", length: int | None = None) -> bytes:
    """An HTTP answer. `length`: what it says of its body's bytes."""
    size = len(body) if length is None else length
    return (
        f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\nConnection: close\r\n{headers}\r\n".encode() + body
    )


@dataclass(eq=False)
class RawServer:
    url: str
    requests: list[bytes] = field(default_factory=list)  # heads and bodies


@asynccontextmanager
async def raw_server(*answers: bytes | None) -> AsyncIterator[RawServer]:
    """
    Give these answers, one for each connection, and close it; then the last one again. None: close without
    one; empty: say nothing until the client leaves.
    """
    left = list(answers)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line.partition(b":")[2])
                    for line in head.lower().split(b"\r\n")
                    if b"content-length" in line
                ),
                0,
            )
            server.requests.append(head + await reader.readexactly(length))
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer == b"":
                await reader.read()
            elif answer is not None:
                writer.write(answer)
                await writer.drain()
        finally:
            writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    server = RawServer(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}")
    async with listening:
        yield server


async def unused_port() -> int:
    """A port on which nothing listened just now."""
    listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port: int = listening.sockets[0].getsockname()[1]
    listening.close()
    await listening.wait_closed()
    return port
