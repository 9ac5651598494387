"""A server for benchmarks that measure over HTTP: the front over an engine, on a loopback socket."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientTimeout
from aiohttp.test_utils import TestClient, TestServer

from kvshare.bench.harness import bench_settings
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.errors import EngineError

Client = TestClient[Any, Any]


@asynccontextmanager
async def serving(overrides: Mapping[str, object]) -> AsyncIterator[tuple[Client, EmbeddedEngine]]:
    """
    A server that is ready, with an empty store and these settings over those of `bench_settings`: its client
    and its engine.

    Raises:  EngineError if the server fails to start
    """
    # The front is a layer above this package; only its benchmarks import it.
    from proxy.app import build_app

    patient = ClientTimeout(total=None)  # a long prompt takes minutes on a busy machine
    with tempfile.TemporaryDirectory() as folder:
        settings = bench_settings(folder, overrides)
        engine = EmbeddedEngine(settings)
        async with TestClient(TestServer(build_app(settings, engine)), timeout=patient) as client:
            while not await _is_ready(client):  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.1)
            yield client, engine


async def _is_ready(client: Client) -> bool:
    async with client.get("/ready") as response:
        document = await response.json()
    if document["status"] == "failed":
        raise EngineError(f"the server did not start: {document['detail']}")
    return response.status == 200
