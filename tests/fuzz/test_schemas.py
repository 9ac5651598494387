"""
Schemas made by a generator, sent wherever a client can write one, by several keys at a time.

None may end or choke the server: no 5xx, no answer after more than ten seconds, no memory that stays, and
other clients are served meanwhile. What is answered with 200 follows the schema. `make fuzz` runs this;
SCHEMAS and FUZZ_SEED choose how many, and which.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvshare.demo import MODEL_PATH
from tests.conftest import Server
from tests.fake_vllm import MODEL, FakeVllm
from tests.fuzz.answers import finished_answer, message_of, mismatch
from tests.fuzz.schemas import Schemas
from tests.proxy.conftest import KEYS as PROXY_KEYS
from tests.proxy.conftest import key_of, key_settings
from tests.proxy.relay.relay_server import running_relay
from tests.schema_places import LENIENT, PLACES, request_at
from tests.vllm_end_to_end.fleet import Fleet, running_fleet

NUM_SCHEMAS = int(os.environ.get("SCHEMAS", "2000"))
NUM_FOR_VLLM = 200
SEED = int(os.environ.get("FUZZ_SEED", "1"))
MAX_S = float(os.environ.get("FUZZ_MAX_S", "10"))  # more, where the machine is busy
MAX_GROWTH_BYTES = 200 * 2**20
HEALTH_S = 2.0
WARM_UP = 40
TOKENS = 16

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("fleet")) as started:
        yield started


@dataclass
class Findings:
    """What went wrong, and how many answers of each status came."""

    wrong: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    num_checked: int = 0
    slowest: dict[int, float] = field(default_factory=dict)  # seconds, by status
    slowest_health_s: float = 0.0

    def add(self, what: str, place: str, schema: object) -> None:
        self.wrong.append(f"{what}: {place}: {json.dumps(schema)[:1500]}")

    def report(self) -> str:
        return (
            f"seed {SEED}: {dict(self.statuses)}, {self.num_checked} answers checked; slowest, in s: "
            f"{self.slowest}; /health {self.slowest_health_s:.2f} s\n" + "\n".join(self.wrong[:20])
        )


@dataclass
class Sender:
    """Sends schemas to one server, and looks at what comes back."""

    url: str
    model: str
    keys: Sequence[str]
    follows: bool  # the answers are those of a model
    findings: Findings = field(default_factory=Findings)
    max_s: float = MAX_S
    allowed: tuple[int, ...] = (200, 400, 429)
    places: Sequence[str] = tuple(PLACES)

    async def send(self, schemas: Sequence[dict[str, Any]]) -> None:
        """All of them, each key one after the other; two at a time for one of the keys."""
        waiting = list(enumerate(schemas))[::-1]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as http:
            watching = asyncio.create_task(self._watch(http))

            async def work(key: str) -> None:
                while waiting:
                    number, schema = waiting.pop()
                    await self._one(http, self.places[number % len(self.places)], schema, key)

            try:
                await asyncio.gather(*(work(key) for key in [*self.keys, self.keys[0]]))
            finally:
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)

    async def _one(self, http: aiohttp.ClientSession, place: str, schema: dict[str, Any], key: str) -> None:
        path, members = request_at(place, schema, model=self.model, max_tokens=TOKENS)
        if self.follows:  # stored KV takes memory that it may take
            members["kvshare"] = {"no_store": True}
        body = json.dumps(members).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        for _ in range(40):
            began = time.monotonic()
            try:
                async with http.post(self.url + path, data=body, headers=headers) as response:
                    status, text = response.status, await response.text()
            except (aiohttp.ClientError, TimeoutError) as exc:
                self.findings.add(
                    f"{type(exc).__name__} after {time.monotonic() - began:.1f} s", place, schema
                )
                return
            seconds = time.monotonic() - began
            self._judge(place, schema, status, text, seconds)
            if status != 429:
                return
            await asyncio.sleep(1)

    def _judge(self, place: str, schema: dict[str, Any], status: int, text: str, seconds: float) -> None:
        found = self.findings
        found.statuses[status] += 1
        found.slowest[status] = max(found.slowest.get(status, 0.0), round(seconds, 1))
        if status not in self.allowed:
            found.add(f"status {status} {text[:300]}", place, schema)
        if seconds > self.max_s:
            found.add(f"{seconds:.1f} s until {status} {text[:200]}", place, schema)
        if status == 400 and not message_of(text):
            found.add(f"no message in {text[:300]}", place, schema)
        if status == 200 and self.follows:
            answer = finished_answer(place, json.loads(text))
            if answer is not None:
                found.num_checked += 1
                if why := mismatch(answer, schema, lenient=place in LENIENT):
                    found.add(f"{answer!r} {why}", place, schema)

    async def _watch(self, http: aiohttp.ClientSession) -> None:
        """Another client is served meanwhile."""
        while True:
            began = time.monotonic()
            async with http.get(self.url + "/health") as response:
                await response.read()
            self.findings.slowest_health_s = max(self.findings.slowest_health_s, time.monotonic() - began)
            await asyncio.sleep(0.2)


def resident_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGESIZE")


def num_children(pid: int) -> int:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(len((task / "children").read_text("ascii").split()) for task in tasks)


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def check(sender: Sender, pid: int | None, num: int) -> None:
    """Send so many; `pid`: the server, whose memory and processes are looked at."""
    schemas = Schemas(SEED)
    say(f"{num} schemas of seed {SEED}")
    await sender.send([schemas.next() for _ in range(WARM_UP)])
    before = resident_bytes(pid) if pid else 0
    await sender.send([schemas.next() for _ in range(num)])
    findings = sender.findings
    if pid:
        grown = resident_bytes(pid) - before
        say(f"memory: {before / 2**20:.0f} MiB before, {grown / 2**20:+.0f} MiB")
        if grown > MAX_GROWTH_BYTES:
            findings.wrong.append(f"the server has grown by {grown / 2**20:.0f} MiB")
    say(findings.report())
    assert not findings.wrong, findings.report()
    assert findings.slowest_health_s < HEALTH_S, findings.report()


@pytest.mark.model
@pytest.mark.skipif(not MODEL_PATH.exists(), reason="the demo model has not been built")
async def test_no_schema_harms_the_embedded_engine(server: Server) -> None:
    """And its processes end with their answers: one is left, which forks the next."""
    keys = [server.key(name) for name in ("ann", "bob", "cid", "dot", "eve")]
    await check(Sender(server.url, "kvshare-demo", keys, follows=True), server.process.pid, NUM_SCHEMAS)
    await asyncio.sleep(1)
    assert num_children(server.process.pid) <= 1


async def test_no_schema_harms_the_relay(tmp_path: Path) -> None:
    """It runs in this process, whose memory is looked at; the fake behind it answers everything."""
    vllm = FakeVllm()
    await vllm.start()
    try:
        async with running_relay(
            tmp_path,
            vllm,
            auth__keys=key_settings(),
            # A fake that shares a busy processor with us is not lost.
            vllm__connect_timeout_s=60.0,
            vllm__control_timeout_s=60.0,
            vllm__health_interval_s=5.0,
        ) as relay:
            keys = [key_of(entry["name"]) for entry in PROXY_KEYS]
            await check(Sender(relay.url, MODEL, keys, follows=False), os.getpid(), NUM_SCHEMAS)
    finally:
        await vllm.stop()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
async def test_no_schema_harms_vllm(fleet: Fleet) -> None:
    """A sample: vLLM still answers afterwards, freely and as JSON."""
    sender = Sender(
        fleet.proxy.url, "bench", [Server.key(name) for name in ("ann", "bob", "cid")], follows=False
    )
    sender.max_s = 60  # vLLM's own time
    sender.allowed = (
        200,
        400,
        429,
        500,
    )  # vLLM's own errors; the proxy's for a vLLM that has ended is 502 or 503
    await check(sender, None, min(NUM_FOR_VLLM, NUM_SCHEMAS))
    last = Sender(fleet.proxy.url, "bench", sender.keys, follows=True, places=("chat", "completion", "text"))
    await last.send([{"enum": [7]}] * 6)
    assert not last.findings.wrong, last.findings.report()
    assert set(last.findings.statuses) == {200}, fleet.why()
    assert last.findings.num_checked == 6
