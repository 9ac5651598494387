"""
`kvshare bench connections`: latency that the relay adds to requests, with and without many idle streams.

Three processes: a model server that answers at once, `kvshare serve --engine vllm` in front of it, and the
clients in this one. Each active client asks about twice a second, through the relay and directly in turns;
each idle one holds a stream that brings a token every ten seconds. Sharing is off: `kvshare bench plan`
measures planning.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from kvshare.cli.open_files import raise_open_files
from kvshare_lab.bench.harness import alternate
from kvshare_lab.bench.upstream import MODEL
from kvshare_lab.vllm import servers
from kvshare_lab.vllm.ports import free_ports

_PAUSE_S = 1.0  # of an active client, at most; half of it on average
_BATCH = 100  # idle streams that are opened at a time
_ARMS = ("alone", "among_idle")
_PATH = "/v1/chat/completions"
_BODY = {"model": MODEL, "messages": [{"role": "user", "content": "yes?"}], "kvshare": {"mode": "off"}}


async def run(
    *, idle: int = 1000, concurrency: int = 50, requests: int = 10, repeats: int = 3, seed: int = 0
) -> dict[str, Any]:
    """Milliseconds added to `requests` of each of `concurrency` clients per round, arms alternating."""
    raise_open_files()
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        upstream, relay = _servers(Path(folder))
        ways = {"relay": relay.url, "direct": upstream.url}

        async def measure(arm: str) -> dict[str, list[float]]:
            async with _idle_streams(http, relay.url, idle if arm == "among_idle" else 0):
                return await _active(http, ways, rng.uniform(0, _PAUSE_S, (concurrency, 2 * requests)))

        with servers.running([upstream]), servers.running([relay]):
            patient, unlimited = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=unlimited, timeout=patient) as http:
                times = await alternate(_ARMS, repeats, measure)
    figures = {arm: _figures(rounds) for arm, rounds in times.items()}
    more = figures["among_idle"]["relay_p99_ms"] - figures["alone"]["relay_p99_ms"]
    return {**figures, "idle_streams_add_p99_ms": more}


def _servers(folder: Path) -> tuple[servers.Server, servers.Server]:
    """The model server and the relay in front of it; there is no connector."""
    port, control_port = free_ports(2)
    upstream = servers.Server(
        name="the model server",
        command=[sys.executable, "-m", "kvshare_lab.bench.upstream", str(port)],
        url=f"http://127.0.0.1:{port}",
        log_path=folder / "upstream.log",
        control_url=f"http://127.0.0.1:{control_port}",
    )
    settings: dict[str, dict[str, Any]] = {"index": {"dense": False}, "logging": {"level": "error"}}
    return upstream, servers.proxy(upstream, folder, token=servers.new_token(), settings=settings)


@asynccontextmanager
async def _idle_streams(http: aiohttp.ClientSession, url: str, number: int) -> AsyncIterator[None]:
    """`number` streams that have brought their first token and stay open until the block ends."""
    streams: list[aiohttp.ClientResponse] = []

    async def begin() -> None:
        body = {**_BODY, "stream": True, "slow": True}
        stream = await http.post(url + _PATH, json=body, raise_for_status=True)
        streams.append(stream)
        await stream.content.readany()

    try:
        while missing := number - len(streams):
            await asyncio.gather(*(begin() for _ in range(min(_BATCH, missing))))
        yield
    finally:
        for stream in streams:
            stream.close()


async def _active(
    http: aiohttp.ClientSession, ways: Mapping[str, str], pauses_s: NDArray[np.float64]
) -> dict[str, list[float]]:
    """
    Seconds of each request until the last byte of its answer, by way.

    Shapes:  pauses_s (clients, requests), the wait before each; requests of a client go either way in turns
    """
    seconds: dict[str, list[float]] = {way: [] for way in ways}

    async def ask_all(pauses: Sequence[float]) -> None:
        for way, pause in zip(cycle(ways), pauses, strict=False):
            await asyncio.sleep(pause)
            began = time.perf_counter()
            async with http.post(ways[way] + _PATH, json=_BODY, raise_for_status=True) as response:
                await response.read()
            seconds[way].append(time.perf_counter() - began)

    await asyncio.gather(*(ask_all(row.tolist()) for row in pauses_s))
    return seconds


def _figures(rounds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """Of one arm: percentiles of both ways over all rounds, and what the relay adds to each."""
    shown: dict[str, float] = {}
    for share in (50, 99):
        relay, direct = (
            1e3 * float(np.percentile(np.concatenate([each[way] for each in rounds]), share))
            for way in ("relay", "direct")
        )
        shown |= {f"relay_p{share}_ms": relay, f"direct_p{share}_ms": direct}
        shown[f"added_p{share}_ms"] = relay - direct
    return shown
