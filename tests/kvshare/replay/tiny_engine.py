"""An OpenAI-shaped server of a few lines, on loopback: one word, and that half of the prompt was cached."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

KEY = "kvs-tiny"


@dataclass
class TinyEngine:
    """Answers `max_answers` requests, then none; counts `num_tokens` in every prompt."""

    max_answers: int = 1_000_000
    num_tokens: int = 100
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)  # of all that was asked
    held: threading.Event = field(default_factory=threading.Event)  # somebody waits in vain

    async def models(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": {"message": "no"}}, status=401)
        return web.json_response({"data": [{"id": "tiny"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if len(self.bodies) > self.max_answers:
            self.held.set()
            await asyncio.sleep(60)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        details = {"cached_tokens": self.num_tokens // 2}
        usage = {"prompt_tokens": self.num_tokens, "prompt_tokens_details": details}
        said = {"choices": [{"delta": {"content": "yes"}, "text": "yes"}], "usage": usage}
        await response.write(b"data: " + json.dumps(said).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    @asynccontextmanager
    async def _listening(self) -> AsyncIterator[None]:
        app = web.Application()
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/chat/completions", self.complete)
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield
        finally:
            await runner.cleanup()


@contextmanager
def running(engine: TinyEngine) -> Iterator[TinyEngine]:
    """Serves it in a thread of its own."""
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

    async def serve() -> None:
        async with engine._listening():
            started.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(timeout=60)
        yield engine
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(timeout=10)
        loop.close()
