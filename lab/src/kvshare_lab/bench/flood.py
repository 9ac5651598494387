"""
`kvshare bench flood`: what a tenant notices of another one that floods the server, with and without quotas.

    alone       the quiet tenant alone
    quotas      beside the other tenant, which has limits
    unlimited   beside the other tenant without any

The quiet tenant asks about its documents in turn, so that it reuses their KV as long as that is stored. The
other one sends unrelated prompts at a fixed rate, whatever becomes of them. The server is `kvshare serve` in
a process of its own, new for each arm; the memory for KV has room for the documents and some seventy of the
flood's prompts. Whether sharing pays is no question here.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from kvshare.cli.open_files import raise_open_files
from kvshare.errors import EngineError
from kvshare_lab.bench.harness import rounds
from kvshare_lab.vllm import servers
from kvshare_lab.vllm.ports import free_ports

_ARMS = ("alone", "quotas", "unlimited")
_PATH, _MODEL = "/v1/completions", "forms"
_DOCUMENTS, _DOCUMENT_TOKENS, _QUESTION_TOKENS = 48, 400, 16
_FLOOD_TOKENS = 200
_VOCAB_SIZE = 1000  # less than the demo model has
_PAUSE_S = 0.2  # of a quiet client between two requests, on average
_KV_BYTES = 320_000_000  # the documents take 184 MB, a prompt of the flood 1.8 MB
_LIMITS = {
    "name": "busy",
    "requests_per_minute": 60,
    "max_in_flight": 1,
    "max_kv_bytes": _KV_BYTES // 8,
}


@dataclass(slots=True)
class Seen:
    """What came of the requests of one arm."""

    seconds: list[float] = field(default_factory=list)  # of the quiet tenant's
    num_prompt: int = 0  # tokens of these
    num_cached: int = 0
    errors: int = 0  # of these
    flood: Counter[int] = field(default_factory=Counter)  # by status


async def run(
    *,
    rate: float = 60.0,
    seconds: float = 30.0,
    concurrency: int = 4,
    repeats: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """
    `rate`: unrelated prompts a second. `concurrency`: clients of the quiet tenant.

    Returns of each arm the quiet tenant's hit rate (tokens) and latency, and what became of the flood; and of
    both arms with a flood the first two relative to those alone.
    """
    raise_open_files()

    async def measure(arm: str) -> Seen:
        with tempfile.TemporaryDirectory() as folder:
            server, arm_rate = _server(Path(folder), arm), 0.0 if arm == "alone" else rate
            with servers.running([server]):
                return await _one(
                    server.url, rate=arm_rate, seconds=seconds, concurrency=concurrency, seed=seed
                )

    seen: dict[str, list[Seen]] = {arm: [] for arm in _ARMS}
    for _, order in rounds(_ARMS, repeats, warms_up=False):  # each server is new
        for arm in order:
            seen[arm].append(await measure(arm))
    arms = {arm: _figures(each) for arm, each in seen.items()}
    alone = arms["alone"]
    relative = {
        arm: {
            "hit_rate": arms[arm]["hit_rate"] / alone["hit_rate"],
            "p99": arms[arm]["p99_ms"] / alone["p99_ms"],
        }
        for arm in ("quotas", "unlimited")
    }
    return {"arms": arms, "relative": relative, "limits": _LIMITS}


def _server(folder: Path, arm: str) -> servers.Server:
    port = free_ports(1)[0]
    keys = [
        {"name": name, "tenant": name, "scope": "tenant", "role": "infer", "sha256": _digest(name)}
        for name in ("quiet", "busy")
    ]
    settings = {
        "server": {"port": port},
        "auth": {"keys": keys, "tenants": [_LIMITS] if arm == "quotas" else []},
        "model": {"path": "demo", "served_name": _MODEL, "dtype": "float32"},
        "store": {"path": str(folder / "store"), "kv_bytes": _KV_BYTES, "disk_bytes": 0},
        "sharing": {"max_risk": 1.0},
        "cost": {"min_saved_s": -3600.0, "min_saved_fraction": 0.0, "measure_at_start": False},
        "control": {"unshared_share": 0.0},
        "index": {"dense": False},
        "logging": {"level": "error"},
    }
    config = folder / "config.yaml"
    config.write_text(json.dumps(settings))  # JSON is YAML
    return servers.Server(
        name="the server",
        command=[sys.executable, "-m", "kvshare.cli.main", "serve", "--config", str(config)],
        url=f"http://127.0.0.1:{port}",
        log_path=folder / "server.log",
        environment={"HF_HUB_OFFLINE": "1"},
        ready_path="/ready",
    )


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def _one(url: str, *, rate: float, seconds: float, concurrency: int, seed: int) -> Seen:
    """The quiet tenant's documents are stored, then both send for so long."""
    rng, seen = np.random.default_rng(seed), Seen()
    documents = rng.integers(0, _VOCAB_SIZE, (_DOCUMENTS, _DOCUMENT_TOKENS)).tolist()
    patient, unlimited = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=unlimited, timeout=patient) as http:
        for document in documents:
            status, _ = await _ask(http, url, "quiet", [*document, *_tokens(rng, _QUESTION_TOKENS)])
            if status != 200:
                raise EngineError(f"a prompt was not answered: expected status 200, got {status}")
        async with _flood(http, url, rate, seen, np.random.default_rng(seed + 1)):
            ends = time.perf_counter() + seconds
            turns = itertools.cycle(documents)
            await asyncio.gather(*(_quiet(http, url, turns, seen, rng, ends) for _ in range(concurrency)))
    return seen


async def _quiet(
    http: aiohttp.ClientSession,
    url: str,
    turns: Iterator[list[int]],
    seen: Seen,
    rng: np.random.Generator,
    ends: float,
) -> None:
    """One client: another question about the next document, and a pause."""
    while time.perf_counter() < ends:
        prompt = [*next(turns), *_tokens(rng, _QUESTION_TOKENS)]
        began = time.perf_counter()
        status, usage = await _ask(http, url, "quiet", prompt)
        if status == 200:
            seen.seconds.append(time.perf_counter() - began)
            seen.num_prompt += usage["prompt_tokens"]
            seen.num_cached += usage["prompt_tokens_details"]["cached_tokens"]
        else:
            seen.errors += 1
        await asyncio.sleep(rng.uniform(0, 2 * _PAUSE_S))


@asynccontextmanager
async def _flood(
    http: aiohttp.ClientSession, url: str, rate: float, seen: Seen, rng: np.random.Generator
) -> AsyncIterator[None]:
    """While inside, unrelated prompts are sent at this rate, without waiting for answers; at 0 none is."""

    async def one() -> None:
        status, _ = await _ask(http, url, "busy", _tokens(rng, _FLOOD_TOKENS))
        seen.flood[status] += 1

    async def send() -> None:
        async with asyncio.TaskGroup() as asking:
            began = time.perf_counter()
            for number in itertools.count():
                await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
                asking.create_task(one())

    task = asyncio.create_task(send()) if rate else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def _ask(
    http: aiohttp.ClientSession, url: str, key: str, prompt: list[int]
) -> tuple[int, dict[str, Any]]:
    """The status and the usage of one answer of a token."""
    body = {"model": _MODEL, "prompt": prompt, "max_tokens": 1}
    headers = {"Authorization": f"Bearer {key}"}
    async with http.post(url + _PATH, json=body, headers=headers) as response:
        document = await response.json()
        return response.status, document.get("usage", {})


def _tokens(rng: np.random.Generator, number: int) -> list[int]:
    return [int(token) for token in rng.integers(0, _VOCAB_SIZE, number)]


def _figures(seen: Sequence[Seen]) -> dict[str, Any]:
    """Of one arm, over all its rounds."""
    seconds = np.concatenate([np.asarray(each.seconds) for each in seen])
    flood: Counter[int] = sum((each.flood for each in seen), Counter())
    shown: Mapping[str, Any] = {f"{status}": number for status, number in sorted(flood.items())}
    return {
        "requests": len(seconds),
        "errors": sum(each.errors for each in seen),
        "hit_rate": sum(each.num_cached for each in seen) / sum(each.num_prompt for each in seen),
        "p50_ms": 1e3 * float(np.percentile(seconds, 50)),
        "p99_ms": 1e3 * float(np.percentile(seconds, 99)),
        "flood_by_status": shown,
    }
