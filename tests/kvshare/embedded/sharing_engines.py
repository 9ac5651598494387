"""Embedded engines that share a Redis."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from delta_tree import TokenIds
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.requests import SharingMode
from kvshare_lab.bench.harness import Answer, ask
from tests.kvshare.embedded.tiny_engine import engine_at
from tests.redis_server import RedisServer

WAIT_S = 90
OWN_DISK, NO_DISK = None, 0


@asynccontextmanager
async def running(
    path: Path, server: RedisServer, *, disk: int | None = OWN_DISK, seed: int = 0, **given: Any
) -> AsyncIterator[EmbeddedEngine]:
    shared = server.settings().model_dump()
    overrides = {f"shared_tier.{name}": value for name, value in shared.items()} | given
    engine = engine_at(path, seed=seed, **{"store.disk_bytes": disk, **overrides})
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def asked(
    engine: EmbeddedEngine, tokens: TokenIds, mode: SharingMode = SharingMode.APPROX, tenant: str = "t"
) -> Answer:
    return await ask(engine, tokens, mode=mode, tenant=tenant, max_tokens=8)


async def until_known(engine: EmbeddedEngine, number: int) -> None:
    """Until it knows so many prompts, and has nothing left to tell."""
    async with asyncio.timeout(WAIT_S):
        while engine.status().num_nodes != number or _unreported(engine):  # noqa: ASYNC110  there is no event
            await asyncio.sleep(0.1)
    await engine.settle()


def _unreported(engine: EmbeddedEngine) -> bool:
    shared = engine.server.shared_prompts
    assert shared is not None
    return shared.num_waiting > 0
