"""
`kvshare bench load --engine vllm`: throughput and latency of concurrent clients.

The same sequence of requests goes to both arms, stock vLLM with its prefix cache and vLLM with KVShare behind
the proxy, turn and turn about:
    mixed       half edits of a few popular prompts, the first edit near the top, half unrelated prompts; with
                a workload the prompts of that file in its order instead, the next ones in each repeat
    unrelated   unrelated prompts only: what sharing costs where there is nothing to share
    prefill     unrelated prompts of which one token is generated, to stock vLLM only: what a prefill costs
In a closed loop, where each client sends its next request when its last one is answered. With `--rate` in an
open loop, mixed only: requests come by chance, so many a second, whatever is answered by then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from delta_tree import Span, TokenIds
from kvshare.bench.bound import computed_spans, prefill_flops
from kvshare.bench.harness import rounds
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Client
from kvshare.bench.vllm.load_figures import Played, closed_figures, open_figures
from kvshare.bench.vllm.reports import Watch
from kvshare.bench.vllm.sequences import Load, Request, play, play_open, poisson_arrivals
from kvshare.bench.vllm.stack import EditedConfig, Stack, StackOptions, document, stack
from kvshare.bench.vllm.workload import FilePrompts, read_prompts
from kvshare.errors import ConfigError
from kvshare.fleet.client import ControlClient

ARMS = ("plain", "shared")
_AFTERWARDS_S = 0.5  # what is left to do after the last answer counts as well: storing it


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    """Output lengths are even in [min_output, max_output]."""

    concurrency: int = 8
    requests: int = 32  # per arm and repeat, mixed
    families: int = 4  # popular prompts
    min_output: int = 16
    max_output: int = 32
    repeats: int = 1
    rate: str | None = None  # requests a second, with commas
    workload: Path | None = None  # a file whose prompts take the place of made-up ones

    @property
    def unrelated_requests(self) -> int:
        return max(self.concurrency, self.requests // 2)

    @property
    def rates(self) -> list[float]:
        """Requests a second; none in a closed loop. Raises ConfigError."""
        try:
            rates = [float(each) for each in self.rate.split(",")] if self.rate is not None else []
        except ValueError:
            rates = [math.nan]
        if not all(0 < rate < math.inf for rate in rates):
            raise ConfigError("--rate", f"expected positive numbers with commas, got {self.rate!r}")
        return rates

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "unrelated_requests": self.unrelated_requests}

    def draw_output(self, rng: np.random.Generator) -> int:
        """The length of one answer."""
        return int(rng.integers(self.min_output, self.max_output + 1))


def run(config: Config) -> dict[str, Any]:
    """
    Ratios are medians over `repeats` sequences, each new to all servers.

    Raises:  ConfigError for rates that are none, EngineError, and LogError where the workload cannot be sent
    """
    num_prompts, given = max(1, len(config.rates)) * config.repeats * config.requests, None
    if config.workload is not None:
        given = read_prompts(config.workload, num_prompts=num_prompts, max_tokens=config.prompt_tokens)
    vllm = replace(config.vllm, max_model_len=config.prompt_tokens + config.max_output + 32)
    with stack(StackOptions(vllm=vllm, kv_bytes=2 * 2**30, seed=config.seed)) as servers:
        return asyncio.run(measure(servers, config, given))


async def measure(servers: Stack, config: Config, given: FilePrompts | None = None) -> dict[str, Any]:
    """The same over servers that run already. `given`: `requests` prompts for each repeat and rate."""
    rng = np.random.default_rng(config.seed)
    sequences = _Sequences(rng, config, [config.stranger(rng) for _ in range(config.families)], given)
    async with servers.clients() as (plain, proxy), servers.control() as control:
        bench = _Load(servers, config, {"plain": plain, "shared": proxy}, control)
        await bench.start(sequences.donated())
        measured = await (bench.open_loop(sequences) if config.rates else bench.closed_loop(sequences))
    summary = {
        **document("load", servers.options, config),
        **measured,
        "decisions": bench.watch.decisions,
    }
    return summary if given is None else {**summary, "workload": given.description}


@dataclass(slots=True)
class _Sequences:
    """Draws what is sent."""

    rng: np.random.Generator
    config: Config
    donors: Sequence[TokenIds]
    given: FilePrompts | None
    num_sent: int = 0  # of the given prompts

    def donated(self) -> list[Request]:
        """The popular prompts themselves."""
        return [Request(donor, self.config.min_output, is_near=False) for donor in self.donors]

    def mixed(self) -> list[Request]:
        if self.given is None:
            return new_sequence(self.rng, self.config, self.donors, num_requests=self.config.requests)
        own = self.given.prompts[self.num_sent : self.num_sent + self.config.requests]
        self.num_sent += self.config.requests
        return given_sequence(self.rng, self.config, own)

    def unrelated(self) -> list[Request]:
        return new_sequence(self.rng, self.config, [], num_requests=self.config.unrelated_requests)

    def prefills(self) -> list[Request]:
        return [replace(request, max_tokens=1) for request in self.unrelated()]


def new_sequence(
    rng: np.random.Generator, config: Config, donors: Sequence[TokenIds], *, num_requests: int
) -> list[Request]:
    """Shuffled; half are edits of evenly drawn donors, if there are any; none is asked twice."""
    num_near = round(num_requests / 2) if donors else 0
    requests = []
    for number in range(num_requests):
        if is_near := number < num_near:
            prompt = config.edited(rng, donors[number % len(donors)])
        else:
            prompt = config.stranger(rng)
        requests.append(Request(prompt, config.draw_output(rng), is_near))
    return [requests[index] for index in rng.permutation(num_requests)]


def given_sequence(rng: np.random.Generator, config: Config, prompts: Sequence[TokenIds]) -> list[Request]:
    """These prompts in their order; only how long the answers are is drawn."""
    return [Request(prompt, config.draw_output(rng), is_near=None) for prompt in prompts]


@dataclass(slots=True)
class _Load:
    """Both arms, and what the connector reports between sequences: while one runs nobody asks it."""

    servers: Stack
    config: Config
    clients: dict[str, Client]
    control: ControlClient
    watch: Watch = field(default_factory=Watch)

    async def start(self, donated: Sequence[Request]) -> None:
        """Every arm has served the popular prompts."""
        for client in self.clients.values():
            await play(client, donated, concurrency=self.config.concurrency)
        await reports.settle(self.clients["shared"])
        await self.watch.look(self.control)
        self.watch.finished.clear()

    async def closed_loop(self, sequences: _Sequences) -> dict[str, Any]:
        found: dict[str, dict[str, list[Played]]] = {
            kind: {name: [] for name in ARMS} for kind in ("mixed", "unrelated")
        }
        prefills = []
        for _, order in rounds(ARMS, self.config.repeats, warms_up=False):
            for kind, sequence in (("mixed", sequences.mixed()), ("unrelated", sequences.unrelated())):
                for name in order:
                    found[kind][name].append(await self._closed(name, sequence))
            prefills.append(await self._closed("plain", sequences.prefills()))
        return closed_figures(found, prefills)

    async def open_loop(self, sequences: _Sequences) -> dict[str, Any]:
        """All rates one after the other; both arms get the same requests at the same times."""
        found = []
        for rate in self.config.rates:
            both: dict[str, list[Load]] = {name: [] for name in ARMS}
            for _, order in rounds(ARMS, self.config.repeats, warms_up=False):
                sequence = sequences.mixed()
                arrivals = poisson_arrivals(sequences.rng, len(sequence), per_s=rate)
                for name in order:
                    both[name].append(await play_open(self.clients[name], sequence, arrivals))
                    await reports.settle(self.clients["shared"])
            found.append(open_figures(rate, both))
        await self.watch.look(self.control)
        return {"open_loop": found}

    async def _closed(self, name: str, sequence: Sequence[Request]) -> Played:
        """One arm, and none pays for what the other left to do."""
        before, num_before = self._cpu_seconds(name), len(self.watch.finished)
        load = await play(self.clients[name], sequence, concurrency=self.config.concurrency)
        await asyncio.sleep(_AFTERWARDS_S)
        cpu_s = self._cpu_seconds(name) - before
        await reports.settle(self.clients["shared"])
        await self.watch.look(self.control)
        if name == "plain":
            spans = [
                Span(answer.num_cached, len(request.prompt))
                for request, answer in zip(load.requests, load.answers, strict=True)
            ]
        else:
            spans = [span for each in self.watch.finished[num_before:] for span in computed_spans(each)]
        return Played(load, cpu_s, prefill_flops(self.servers.options.model_config, spans))

    def _cpu_seconds(self, name: str) -> float:
        """Of all processes that serve an arm."""
        servers = self.servers
        serving = (servers.plain,) if name == "plain" else (servers.shared, servers.proxy)
        return sum(server.cpu_seconds() for server in serving)
