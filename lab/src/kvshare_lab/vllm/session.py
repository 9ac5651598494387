"""A vLLM benchmark at work: clients of its servers, its prompts, and what the servers report meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from delta_tree import TokenIds
from kvshare.errors import EngineError
from kvshare.fleet.client import ControlClient
from kvshare.http_client import session as http_session
from kvshare.vllm_protocol.messages import Dropped, FinishedReport
from kvshare_lab.vllm.client import Answer, Client
from kvshare_lab.vllm.prompts import unrelated_prompt
from kvshare_lab.vllm.stack import BenchConfig, EditedConfig, Stack, StackOptions, document, stack

ConfigT = TypeVar("ConfigT", bound=BenchConfig)
EditedT = TypeVar("EditedT", bound=EditedConfig)

_CONTROL_TIMEOUT_S = 60.0  # the process of a loaded vLLM may be slow to answer
_POLL_S, _WATCH_S = 0.02, 0.05
# For a second after its last message, a worker of vLLM waits in a busy loop (`SpinCondition`). On cores that
# two vLLMs share, it takes half of the time of the other one.
_QUIET_S = 1.2
_QUIET_ON_DEVICE_S = 0.4  # there vLLM's threads are not bound to cores that another one has, too


@dataclass(slots=True)
class Watch:
    """What a connector has reported since the watch began."""

    control: ControlClient
    max_bytes: int = 0  # that it may store
    peak_bytes: int = 0  # that it has stored
    num_dropped: int = 0  # segments
    seen: list[FinishedReport] = field(default_factory=list)
    last: int = 0  # event that was read

    async def look(self) -> list[FinishedReport]:
        """Read the events since the last look. Returns the requests that have finished."""
        info = await self.control.info()
        self.max_bytes = info.max_bytes
        self.peak_bytes = max(self.peak_bytes, info.num_bytes)
        journal = await self.control.journal(after=self.last, wait_s=0)
        self.last = journal.last
        dropped = (event.segment_ids for event in journal.events if isinstance(event, Dropped))
        self.num_dropped += sum(map(len, dropped))
        new = [event for event in journal.events if isinstance(event, FinishedReport)]
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
    watch = Watch(control, last=(await control.journal(after=0, wait_s=0)).last)

    async def keep_looking() -> None:
        while True:
            await watch.look()
            await asyncio.sleep(_WATCH_S)

    task = asyncio.create_task(keep_looking())
    try:
        yield watch
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await watch.look()


@dataclass(slots=True)
class Session(Generic[ConfigT]):
    """
    What a benchmark works with.

    `plain`: stock vLLM. `shared`: the vLLM that has the connector. `proxy`: the proxy in front of that one,
    if the benchmark has started it.
    """

    servers: Stack
    config: ConfigT
    plain: Client
    shared: Client
    proxy: Client
    control: ControlClient
    watch: Watch
    rng: np.random.Generator
    quiet_s: float = _QUIET_S

    def unrelated(self: Session[EditedT]) -> TokenIds:
        """A prompt that shares nothing with any other."""
        return unrelated_prompt(self.rng, self.config.prompt_tokens)

    def edited(self: Session[EditedT], donor: TokenIds, *, is_even: bool = False) -> TokenIds:
        return self.config.edited(self.rng, donor, is_even=is_even)

    async def stats(self, part: str = "totals") -> Mapping[str, Any]:
        """
        Of the proxy. `totals`: num_nodes, num_segments, num_bytes of all that is stored. `costs`: the rates
        that it plans with, and which of them it has measured.
        """
        found: Mapping[str, Any] = json.loads(await self.proxy.fetch("/admin/stats"))[part]
        return found

    async def settle(self) -> None:
        """Wait until what was served is stored and indexed, or dropped, and no server disturbs another."""
        stats, since = await self.stats(), time.monotonic()
        while time.monotonic() - since < self.quiet_s or await self._has_unsettled():
            await asyncio.sleep(_POLL_S)
            if (now := await self.stats()) != stats:
                stats, since = now, time.monotonic()

    async def store(
        self, prompt: TokenIds, *, max_tokens: int = 1
    ) -> tuple[Answer, FinishedReport, dict[str, float]]:
        """
        A request through the proxy, until it is stored: the connector's report, and milliseconds by stage,
        the connector's with `vllm_` before the name.

        Raises:  EngineError if the connector does not report it
        """
        await self.watch.look()
        before = await self.proxy.counters()
        answer = await self.proxy.complete(prompt, max_tokens=max_tokens)
        await self.settle()
        finished = await self.watch.look()
        if not finished:
            raise EngineError(f"the connector has not reported a request of {len(prompt)} tokens")
        inside = {f"vllm_{stage}": 1e3 * seconds for stage, seconds in finished[-1].stage_seconds.items()}
        counted = (await self.proxy.counters()).since(before)
        return answer, finished[-1], {**counted.stage_ms, **inside}

    async def _has_unsettled(self) -> bool:
        """Whether the report of one of the latest requests is to come, or is not in the index yet."""
        rows = json.loads(await self.proxy.fetch("/admin/requests?limit=100"))["requests"]
        sent = (row for row in rows if row.get("replica") is not None)
        return not all(entry["settled"] for row in sent for entry in row["stored"])

    async def begin(self, donors: Iterable[TokenIds] = ()) -> None:
        """Have both sides serve these prompts. What the connector reported until then is not counted."""
        for donor in donors:
            for client in (self.plain, self.proxy):
                await client.complete(donor)
        await self.settle()
        await self.watch.look()
        self.watch.seen.clear()


@asynccontextmanager
async def session(servers: Stack, config: ConfigT) -> AsyncIterator[Session[ConfigT]]:
    """Over servers that run already."""
    assert servers.shared.control_url is not None
    async with (
        http_session(servers.plain.url, key=None) as plain,
        http_session(servers.shared.url, key=None) as shared,
        http_session(servers.proxy.url, key=None) as proxy,
        ControlClient(
            servers.shared.control_url, token=servers.token, timeout_s=_CONTROL_TIMEOUT_S
        ) as control,
    ):
        rng, watch = np.random.default_rng(config.seed), Watch(control)
        clients = (Client(plain), Client(shared), Client(proxy))
        has_device = servers.options.vllm.device_memory is not None
        yield Session(
            servers, config, *clients, control, watch, rng, _QUIET_ON_DEVICE_S if has_device else _QUIET_S
        )


Measure = Callable[[Session[ConfigT]], Awaitable[dict[str, Any]]]


async def measured(measure: Measure[ConfigT], servers: Stack, config: ConfigT) -> dict[str, Any]:
    """What a benchmark measures over servers that run already, without the head of its document."""
    async with session(servers, config) as bench:
        return await measure(bench)


def run_benchmark(
    name: str,
    measure: Measure[ConfigT],
    config: ConfigT,
    start: Callable[[StackOptions], AbstractContextManager[Stack]] = stack,
) -> dict[str, Any]:
    """Start the servers that the config describes, measure, and return the whole document."""
    with start(config.options) as servers:
        found = asyncio.run(measured(measure, servers, config))
    return {**document(name, config.options, config), **found}
