"""A vLLM benchmark at work: its servers, clients, prompts, and what the connector reports meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Client
from kvshare.bench.vllm.reports import Watch
from kvshare.bench.vllm.stack import BenchConfig, EditedConfig, Stack, StackOptions, document
from kvshare.fleet.client import ControlClient
from kvshare.vllm_protocol.messages import Finished

ServersT = TypeVar("ServersT")
ConfigT = TypeVar("ConfigT", bound=BenchConfig)
EditedT = TypeVar("EditedT", bound=EditedConfig)


def run_benchmark(
    name: str,
    config: ConfigT,
    measure: Callable[[ServersT, ConfigT], Coroutine[Any, Any, dict[str, Any]]],
    start: Callable[[StackOptions], AbstractContextManager[ServersT]],
) -> dict[str, Any]:
    """Start the servers that the config describes, measure, and return the whole document."""
    with start(config.options) as servers:
        return {**document(name, config.options, config), **asyncio.run(measure(servers, config))}


@dataclass(slots=True)
class Session(Generic[EditedT]):
    """
    What a benchmark of edited prompts works with.

    `plain`: stock vLLM. `proxy`: the proxy in front of the vLLM that has the connector.
    """

    servers: Stack
    config: EditedT
    plain: Client
    proxy: Client
    control: ControlClient
    rng: np.random.Generator
    watch: Watch = field(default_factory=Watch)

    def unrelated(self) -> TokenIds:
        """A prompt that shares nothing with any other."""
        return self.config.unrelated(self.rng)

    def edited(self, donor: TokenIds, *, is_even: bool = False) -> TokenIds:
        return self.config.edited(self.rng, donor, is_even=is_even)

    async def settle(self) -> None:
        """Wait until all that was served is stored."""
        await reports.settle(self.proxy)

    async def finished(self) -> list[Finished]:
        """What the connector has reported of requests since the last call."""
        return await self.watch.look(self.control)

    async def begin(self, donors: Iterable[TokenIds] = ()) -> None:
        """Have both sides serve these prompts. What the connector reported until then is not counted."""
        for donor in donors:
            for client in (self.plain, self.proxy):
                await client.complete(donor)
        await self.settle()
        await self.finished()
        self.watch.seen.clear()


@asynccontextmanager
async def session(servers: Stack, config: EditedT) -> AsyncIterator[Session[EditedT]]:
    """Over servers that run already."""
    async with servers.clients() as (plain, proxy), servers.control() as control:
        yield Session(servers, config, plain, proxy, control, np.random.default_rng(config.seed))
