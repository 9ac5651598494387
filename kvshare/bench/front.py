"""A server for benchmarks that measure over HTTP: the front over an engine, on a loopback socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientTimeout
from aiohttp.test_utils import TestClient, TestServer

from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.errors import EngineError
from kvshare.settings import Settings

Client = TestClient[Any, Any]


@asynccontextmanager
async def serving(settings: Settings, engine: EmbeddedEngine) -> AsyncIterator[Client]:
    """A client of a server that is ready. Raises EngineError if the server fails to start."""
    # The front is a layer above this package; only its benchmarks import it.
    from proxy.app import build_app

    patient = ClientTimeout(total=None)  # a long prompt takes minutes on a busy machine
    async with TestClient(TestServer(build_app(settings, engine)), timeout=patient) as client:
        while not await _is_ready(client):  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.1)
        yield client


async def _is_ready(client: Client) -> bool:
    async with client.get("/ready") as response:
        document = await response.json()
    if document["status"] == "failed":
        raise EngineError(f"the server did not start: {document['detail']}")
    return response.status == 200
