"""The real front around the real embedded engine, with the bundled demo model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp import web

from kvshare.embedded.engine import EmbeddedEngine
from proxy.app import build_app
from proxy.connection import FrontRunner
from proxy.context import SERVER
from tests.proxy.conftest import settings_with


@dataclass
class EmbeddedServer:
    """A running server and a client of it."""

    url: str
    engine: EmbeddedEngine
    http: aiohttp.ClientSession

    async def chat(
        self, *messages: tuple[str, str], headers: Mapping[str, str] | None = None, **extra: object
    ) -> aiohttp.ClientResponse:
        """The answer to these messages of roles; what was computed for it is stored by then."""
        given = [{"role": role, "content": content} for role, content in messages]
        body = {"model": "kvshare-demo", "messages": given, "max_tokens": 2, "temperature": 0, **extra}
        url = f"{self.url}/v1/chat/completions"
        async with self.http.post(url, json=body, headers=headers) as response:
            await response.read()
        await self.engine.settle()
        return response

    async def history(self, answer: aiohttp.ClientResponse) -> dict[str, Any]:
        """What `/admin/requests` says of an answer."""
        unique_id = answer.headers["X-KVShare-Request"]
        async with self.http.get(f"{self.url}/admin/requests/{unique_id}") as response:
            document: dict[str, Any] = await response.json()
        return document


@asynccontextmanager
async def running_embedded(**overrides: object) -> AsyncIterator[EmbeddedServer]:
    """The server on a free port, without embeddings, in float32. It shares however busy the machine is."""
    always: dict[str, object] = {"cost__min_saved_s": -3600.0, "cost__min_saved_fraction": 0.0}
    always["cost__learn"] = False
    model: dict[str, object] = {"model__path": "demo", "model__dtype": "float32"}
    without: dict[str, object] = {"store__path": None, "index__dense": False}
    settings = settings_with(**(without | always | model | overrides))
    engine = EmbeddedEngine(settings)
    app = build_app(settings, engine)
    runner = FrontRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with aiohttp.ClientSession() as http:
            await app[SERVER].lifecycle.wait_started()
            yield EmbeddedServer(f"http://127.0.0.1:{runner.addresses[0][1]}", engine, http)
    finally:
        await runner.cleanup()
