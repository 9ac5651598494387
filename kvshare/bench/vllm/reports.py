"""
What the proxy and the connector report to their operator, as the benchmarks read it: what is stored, metrics,
and the events of the connector's control server while a benchmark runs.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from kvshare.bench.vllm.client import Client
from kvshare.errors import EngineError
from kvshare.fleet.client import ControlClient
from kvshare.vllm_protocol.messages import Dropped, Finished

_POLL_S, _WATCH_S = 0.02, 0.05
_STORE_S = 60.0


@dataclass(frozen=True, slots=True)
class Counters:
    """All samples of a `/metrics` page, by name and labels."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def by(self, name: str, *labels: str) -> dict[str, float]:
        """Sums of the samples of that name, by the values of these labels."""
        found: defaultdict[str, float] = defaultdict(float)
        for (sample, pairs), value in self.samples.items():
            if sample == name:
                values = dict(pairs)
                found[": ".join(values[label] for label in labels if values[label])] += value
        return dict(found)

    def total(self, name: str) -> float:
        return sum(self.by(name).values())

    def since(self, before: Counters) -> Counters:
        return Counters({key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()})

    @property
    def stage_ms(self) -> dict[str, float]:
        """Mean milliseconds per stage of the proxy's requests."""
        seconds = self.by("kvshare_stage_duration_seconds_sum", "stage")
        counts = self.by("kvshare_stage_duration_seconds_count", "stage")
        return {stage: 1e3 * seconds[stage] / count for stage, count in counts.items() if count}

    @property
    def lookups(self) -> dict[str, int]:
        """Number of requests by what was planned for them, and the reason if not more was."""
        found = self.by("kvshare_lookup_requests_total", "result", "reason")
        return {said: int(count) for said, count in found.items() if count}


async def read_counters(client: Client) -> Counters:
    """The metrics of the proxy, or of a vLLM."""
    text = await client.get("/metrics")
    return Counters(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )


async def read_block_size(vllm: Client) -> int:
    """Tokens per block of a vLLM's prefix cache."""
    sizes = (await read_counters(vllm)).by("vllm:cache_config_info", "block_size")
    return int(next(iter(sizes)))


async def read_stats(proxy: Client, part: str = "totals") -> Mapping[str, Any]:
    """
    `totals`: num_nodes, num_segments, num_bytes of all that is stored. `costs`: the rates that the proxy
    plans with, and which of them it has measured.
    """
    found: Mapping[str, Any] = json.loads(await proxy.get("/admin/stats"))[part]
    return found


async def wait_stats(proxy: Client, holds: Callable[[Mapping[str, Any]], bool]) -> Mapping[str, Any]:
    """The first stats of which `holds` is true. Raises EngineError after a minute."""
    deadline = time.monotonic() + _STORE_S
    while not holds(stats := await read_stats(proxy)):
        if time.monotonic() > deadline:
            raise EngineError(f"the proxy has not stored the prompt after {_STORE_S:g} s: {dict(stats)}")
        await asyncio.sleep(_POLL_S)
    return stats


async def settle(proxy: Client, quiet_s: float = 0.5) -> Mapping[str, Any]:
    """The stats once they have not changed for `quiet_s`: all is stored or dropped by then."""
    stats, since = await read_stats(proxy), time.monotonic()
    while time.monotonic() - since < quiet_s:
        await asyncio.sleep(_POLL_S)
        if (now := await read_stats(proxy)) != stats:
            stats, since = now, time.monotonic()
    return stats


async def evict_one(proxy: Client, rng: np.random.Generator) -> None:
    """Evict a prompt of the tree's first levels, if it has any and they were not evicted meanwhile."""
    node_ids = _node_ids(json.loads(await proxy.get("/admin/tree", depth="3"))["roots"])
    if not node_ids:
        return
    chosen = node_ids[int(rng.integers(len(node_ids)))]
    try:
        await proxy.post("/admin/evict", {"node": chosen})
    except EngineError as exc:
        if "node_not_found" not in str(exc):
            raise


def _node_ids(branches: list[Mapping[str, Any]]) -> list[int]:
    return [node_id for branch in branches for node_id in (int(branch["id"]), *_node_ids(branch["children"]))]


@dataclass(slots=True)
class Watch:
    """What the connector has reported since the watch began."""

    max_bytes: int = 0  # that it may store
    peak_bytes: int = 0  # that it has stored
    num_dropped: int = 0  # segments
    seen: list[Finished] = field(default_factory=list)
    last: int = 0  # event that was read

    async def look(self, control: ControlClient) -> list[Finished]:
        """Read the events since the last look. Returns the requests that have finished."""
        info = await control.info()
        self.max_bytes = info.max_bytes
        self.peak_bytes = max(self.peak_bytes, info.num_bytes)
        journal = await control.journal(after=self.last, wait_s=0)
        self.last = journal.last
        self.num_dropped += sum(
            len(event.segment_ids) for event in journal.events if isinstance(event, Dropped)
        )
        new = [event for event in journal.events if isinstance(event, Finished)]
        self.seen += new
        return new

    @property
    def decisions(self) -> dict[str, int]:
        """Number of requests by decision, and by the reason if less was shared than planned."""
        found: Counter[str] = Counter(event.decision for event in self.seen)
        found.update(f"reason:{event.reason}" for event in self.seen if event.reason is not None)
        return dict(sorted(found.items()))


@asynccontextmanager
async def watching(control: ControlClient) -> AsyncIterator[Watch]:
    """A watch that looks twenty times a second and once more at the end. Earlier events are not counted."""
    watch = Watch()
    watch.last = (await control.journal(after=0, wait_s=0)).last

    async def keep_looking() -> None:
        while True:
            await watch.look(control)
            await asyncio.sleep(_WATCH_S)

    task = asyncio.create_task(keep_looking())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await watch.look(control)
