"""
`kvshare bench connections`: what the relay adds to active requests, with and without many idle streams.

Three processes: a model server that answers at once, `kvshare serve --engine vllm` before it, and here the
clients. Each active client asks about twice a second, in turns through the relay and past it; the idle ones
hold a stream that says something every ten seconds. Requests have mode off: planning is measured elsewhere.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from kvshare.bench.harness import rounds
from kvshare.bench.upstream import MODEL
from kvshare.bench.vllm import servers
from kvshare.cli.open_files import raise_open_files

_PAUSE_S = 1.0  # of an active client, at most; half of it on average
_BATCH = 100  # idle streams that are opened at a time
_ARMS = ("alone", "among_idle")
_BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "yes?"}],
    "kvshare": {"mode": "off"},
}


async def run(
    *, idle: int = 1000, concurrency: int = 50, requests: int = 10, repeats: int = 3, seed: int = 0
) -> dict[str, Any]:
    """Milliseconds added to `requests` of each of `concurrency` clients per round, arms alternating."""
    raise_open_files()
    rng = np.random.default_rng(seed)
    times: dict[str, dict[str, list[float]]] = {arm: {"relay": [], "direct": []} for arm in _ARMS}
    with tempfile.TemporaryDirectory() as folder:
        upstream, relay = _servers(Path(folder))
        with servers.running([upstream]), servers.running([relay]):
            async with _client() as http:
                for counts, arms in rounds(_ARMS, repeats):
                    for arm in arms:
                        async with _idle_streams(http, relay.url, idle if arm == "among_idle" else 0):
                            measured = await _active(http, relay, upstream, concurrency, requests, rng)
                        for way, seconds in measured.items() if counts else ():
                            times[arm][way] += seconds
    figures = {arm: _figures(ways) for arm, ways in times.items()}
    more = figures["among_idle"]["relay_p99_ms"] - figures["alone"]["relay_p99_ms"]
    return {**figures, "idle_streams_add_p99_ms": more}


def _servers(folder: Path) -> tuple[servers.Server, servers.Server]:
    """The model server and the relay; nothing listens where a connector would."""
    port, control_port = servers.free_ports(2)
    upstream = servers.Server(
        name="the model server",
        command=[sys.executable, "-m", "kvshare.bench.upstream", str(port)],
        url=f"http://127.0.0.1:{port}",
        log_path=folder / "upstream.log",
        control_url=f"http://127.0.0.1:{control_port}",
    )
    settings: dict[str, dict[str, Any]] = {"index": {"dense": False}, "logging": {"level": "error"}}
    return upstream, servers.proxy(upstream, folder, token=servers.new_token(), settings=settings)


@asynccontextmanager
async def _client() -> AsyncIterator[aiohttp.ClientSession]:
    """Without limits of connections and time."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as http:
        yield http


@asynccontextmanager
async def _idle_streams(http: aiohttp.ClientSession, url: str, number: int) -> AsyncIterator[None]:
    """So many streams that have said their first token; they are read as long as the block lasts."""
    reading: list[asyncio.Task[None]] = []
    try:
        while len(reading) < number:
            begun = [asyncio.Event() for _ in range(min(_BATCH, number - len(reading)))]
            reading += [asyncio.create_task(_read_slowly(http, url, event)) for event in begun]
            await asyncio.gather(*(event.wait() for event in begun))
        yield
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _read_slowly(http: aiohttp.ClientSession, url: str, begun: asyncio.Event) -> None:
    body = {**_BODY, "stream": True, "slow": True}
    async with http.post(f"{url}/v1/chat/completions", json=body, raise_for_status=True) as response:
        async for _ in response.content.iter_any():
            begun.set()


async def _active(
    http: aiohttp.ClientSession,
    relay: servers.Server,
    upstream: servers.Server,
    concurrency: int,
    requests: int,
    rng: np.random.Generator,
) -> dict[str, list[float]]:
    """Seconds of each request, by the way that it took."""
    ways = {"relay": relay.url, "direct": upstream.url}
    seconds: dict[str, list[float]] = {way: [] for way in ways}

    async def ask_all(pauses: Sequence[float]) -> None:
        for number, pause in enumerate(pauses):
            way = "relay" if number % 2 else "direct"
            await asyncio.sleep(pause)
            seconds[way].append(await _ask(http, ways[way]))

    pauses = rng.uniform(0, _PAUSE_S, (concurrency, 2 * requests))
    await asyncio.gather(*(ask_all(row.tolist()) for row in pauses))
    return seconds


async def _ask(http: aiohttp.ClientSession, url: str) -> float:
    """Seconds from the request to the last byte of its answer."""
    began = time.perf_counter()
    async with http.post(f"{url}/v1/chat/completions", json=_BODY, raise_for_status=True) as response:
        await response.read()
    return time.perf_counter() - began


def _figures(ways: dict[str, list[float]]) -> dict[str, float]:
    """Percentiles of both ways, and what the relay adds to each."""
    shown = {
        f"{way}_p{share}_ms": 1e3 * float(np.percentile(seconds, share))
        for way, seconds in ways.items()
        for share in (50, 99)
    }
    added = {
        f"added_p{share}_ms": shown[f"relay_p{share}_ms"] - shown[f"direct_p{share}_ms"] for share in (50, 99)
    }
    return {**shown, **added}
