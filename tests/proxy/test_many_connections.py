"""A thousand clients that mostly wait, as chats do, take nothing away from those that are active."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from kvshare.cli.open_files import raise_open_files
from kvshare.demo import MODEL_PATH
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.settings import Settings
from kvshare_lab.bench.harness import bench_settings
from proxy.app import build_app
from proxy.connection import FrontRunner
from proxy.context import SERVER
from tests.fake_vllm import MODEL, FakeVllm, running_vllm
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import running_relay

NUM_IDLE = 1000
NUM_ACTIVE = 50
CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def _enough_files() -> None:
    """Client, front, its own client and the model server are one process here: four sockets for a stream."""
    if 0 < raise_open_files() < 5 * NUM_IDLE:
        pytest.skip("this process may not have enough files open")


@asynccontextmanager
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    """Without a limit of connections."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as http:
        yield http


@pytest.mark.slow
async def test_active_requests_among_idle_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Before vLLM, with a thousand streams open that say something every minute, others get the very answer
    that one gets alone; and so do the streams.
    """
    monkeypatch.setattr("tests.fake_vllm.SLOW_TOKEN_S", 60.0)
    patient: dict[str, Any] = {"vllm__connect_timeout_s": 60.0, "vllm__control_timeout_s": 60.0}
    patient["server__keep_alive_s"] = 3600.0
    async with running_vllm() as vllm, running_relay(tmp_path, vllm, **patient) as relay, client() as http:
        url = relay.url + CHAT
        alone = await stream(http, url, slow=False)
        idle: list[asyncio.Task[tuple[int, bytes]]] = []
        while len(idle) < NUM_IDLE:  # a hundred at a time: all of it shares one event loop
            idle += [asyncio.create_task(stream(http, url, slow=True)) for _ in range(100)]
            await eventually(partial(has_begun, vllm, 1 + len(idle)))
        for _ in range(2):
            active = await asyncio.gather(*(stream(http, url, slow=False) for _ in range(NUM_ACTIVE)))
            assert set(active) == {alone}
        assert relay.lifecycle.num_running == NUM_IDLE
        assert not any(task.done() for task in idle)
        vllm.hurry.set()
        assert set(await asyncio.gather(*idle)) == {alone}
    assert relay.lifecycle.num_running == 0


async def stream(http: aiohttp.ClientSession, url: str, *, slow: bool) -> tuple[int, bytes]:
    """The status and all bytes of a streamed answer."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "stream": True, "slow": slow}
    async with http.post(url, json=body) as response:
        return response.status, await response.read()


def has_begun(vllm: FakeVllm, num_answers: int) -> bool:
    return len(vllm.generated) == num_answers


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
async def test_a_burst_among_idle_connections(tmp_path: Path) -> None:
    """With a thousand connections kept alive, of 100 requests those that have a place are answered."""
    settings = bench_settings(str(tmp_path), {"index.dense": False})
    num_places = settings.engine.max_running + settings.engine.max_waiting
    engine = EmbeddedEngine(settings)
    async with listening(settings, engine) as url, client() as http:
        idle = [await KeptAlive.open(url) for _ in range(NUM_IDLE)]
        assert set(await asyncio.gather(*(each.ask() for each in idle))) == {b"200"}
        with computing_stopped(engine):
            burst = [asyncio.create_task(ask(http, url, engine.card.model_id)) for _ in range(100)]
            await eventually(lambda: sum(task.done() for task in burst) >= 100 - num_places, timeout_s=60)
        answers = await asyncio.gather(*burst)
        statuses = [status for status, _ in answers]
        assert (statuses.count(200), statuses.count(429)) == (72, 28)
        refused = next(headers for status, headers in answers if status == 429)
        assert (refused["Retry-After"], refused["retry-after-ms"]) == ("1", "1000")
        assert set(await asyncio.gather(*(each.ask() for each in idle))) == {b"200"}
        for each in idle:
            each.writer.close()


@asynccontextmanager
async def listening(settings: Settings, engine: EmbeddedEngine) -> AsyncIterator[str]:
    """The URL of a front over an engine that is up."""
    app = build_app(settings, engine)
    runner = FrontRunner(app, shutdown_timeout=0.5)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        await app[SERVER].lifecycle.wait_started()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@contextmanager
def computing_stopped(engine: EmbeddedEngine) -> Iterator[None]:
    """The engine's only worker waits inside: what has a place cannot end and give it to another."""
    go_on = threading.Event()
    engine.server.scheduler._worker.submit(go_on.wait)
    try:
        yield
    finally:
        go_on.set()


async def ask(http: aiohttp.ClientSession, url: str, model: str) -> tuple[int, Mapping[str, str]]:
    """Status and headers of a short answer."""
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    async with http.post(url + CHAT, json=body) as response:
        await response.read()
        return response.status, response.headers


@dataclass(frozen=True)
class KeptAlive:
    """One connection that says something now and then."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def open(cls, url: str) -> KeptAlive:
        return cls(*await asyncio.open_connection("127.0.0.1", URL(url).port))

    async def ask(self) -> bytes:
        """The status of GET /health."""
        self.writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        head = await self.reader.readuntil(b"\r\n\r\n")
        await self.reader.readexactly(int(re.findall(rb"Content-Length: (\d+)", head)[0]))
        return head.split(b" ")[1]
