"""
`kvshare bench load --engine vllm`: throughput and latency of concurrent clients.

The same sequence of requests goes to both arms in turns: stock vLLM with its prefix cache, and vLLM with
KVShare behind the proxy.
    mixed       half edits of a few popular prompts, the first edit near the top, half unrelated prompts. With
                a workload, its prompts in their order instead, and in each repeat the next ones
    unrelated   unrelated prompts only: what sharing costs where there is nothing to share
    prefill     unrelated prompts with one token of answer, to stock vLLM only: what a prefill costs
In a closed loop each client sends its next request when its last one is answered. With `--rate` there is an
open loop, mixed only: requests arrive at random, so many a second, whatever is answered by then.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from delta_tree import Span, TokenIds
from kvshare.errors import ConfigError
from kvshare_lab.bench.bound import computed_spans
from kvshare_lab.bench.harness import rounds
from kvshare_lab.vllm.client import Client
from kvshare_lab.vllm.prompts import unrelated_prompt
from kvshare_lab.vllm.sequences import (
    FilePrompts,
    Load,
    Request,
    closed_figures,
    open_figures,
    play,
    play_open,
    poisson_arrivals,
    read_prompts,
)
from kvshare_lab.vllm.session import Session, run_benchmark
from kvshare_lab.vllm.stack import EditedConfig, StackOptions

ARMS = ("plain", "shared")
_AFTERWARDS_S = 0.5  # storing after the last answer counts as well


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    """Output lengths are drawn evenly from [min_output, max_output]."""

    concurrency: int = 8
    requests: int = 32  # per arm and repeat, mixed
    families: int = 4  # popular prompts
    min_output: int = 16
    max_output: int = 32
    repeats: int = 7
    rate: str | None = None  # requests a second, with commas
    workload: Path | None = None  # a file whose prompts take the place of made-up ones

    @property
    def options(self) -> StackOptions:
        vllm = replace(self.vllm, max_model_len=self.prompt_tokens + self.max_output + 32)
        return self.stack_of(vllm, kv_bytes=2 * 2**30)

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

    def request(self, rng: np.random.Generator, prompt: TokenIds, *, is_near: bool | None) -> Request:
        """With an answer whose length is drawn."""
        return Request(prompt, int(rng.integers(self.min_output, self.max_output + 1)), is_near)


def run(config: Config) -> dict[str, Any]:
    """
    Ratios are medians over `repeats` sequences, each new to all servers.

    Raises:  ConfigError for a rate that is no positive number, EngineError, and LogError where the workload
             cannot be sent
    """
    num_prompts, given = max(1, len(config.rates)) * config.repeats * config.requests, None
    if config.workload is not None:
        given = read_prompts(config.workload, num_prompts=num_prompts, max_tokens=config.prompt_tokens)
    return run_benchmark("load", partial(measure, given=given), config)


async def measure(bench: Session[Config], given: FilePrompts | None = None) -> dict[str, Any]:
    """`given`: `requests` prompts for each repeat and rate."""
    config = bench.config
    load = _Load(bench, [bench.unrelated() for _ in range(config.families)], given)
    await load.start()
    measured = await (load.open_loop() if config.rates else load.closed_loop())
    summary = {**measured, "decisions": bench.watch.decisions}
    return summary if given is None else {**summary, "workload": given.description}


def new_sequence(
    rng: np.random.Generator,
    config: Config,
    donors: Sequence[TokenIds],
    *,
    num_requests: int,
    near: float = 0.5,
) -> list[Request]:
    """Shuffled requests, all different: a share of them are edits of the donors in turn, if there are any."""
    num_near = round(num_requests * near) if donors else 0
    requests = []
    for number in range(num_requests):
        if is_near := number < num_near:
            prompt = config.edited(rng, donors[number % len(donors)])
        else:
            prompt = unrelated_prompt(rng, config.prompt_tokens)
        requests.append(config.request(rng, prompt, is_near=is_near))
    return [requests[index] for index in rng.permutation(num_requests)]


def given_sequence(rng: np.random.Generator, config: Config, prompts: Sequence[TokenIds]) -> list[Request]:
    """These prompts in their order; only the lengths of the answers are drawn."""
    return [config.request(rng, prompt, is_near=None) for prompt in prompts]


@dataclass(slots=True)
class _Load:
    """Sequences to both arms. The connector's events are read between sequences, not while one runs."""

    bench: Session[Config]
    donors: Sequence[TokenIds]
    given: FilePrompts | None
    num_sent: int = 0  # of the given prompts

    async def start(self) -> None:
        """Have both arms serve the popular prompts."""
        config = self.bench.config
        donated = [Request(donor, config.min_output, is_near=False) for donor in self.donors]
        for name in ARMS:
            await play(self._client(name), donated, concurrency=config.concurrency)
        await self.bench.begin()

    async def closed_loop(self) -> dict[str, Any]:
        found: dict[str, dict[str, list[Load]]] = {
            kind: {name: [] for name in ARMS} for kind in ("mixed", "unrelated")
        }
        prefills = []
        for _, order in rounds(ARMS, self.bench.config.repeats, warms_up=False):
            for kind, sequence in (("mixed", self._mixed()), ("unrelated", self._unrelated())):
                for name in order:
                    found[kind][name].append(await self._closed(name, sequence))
            one_token = [replace(request, max_tokens=1) for request in self._unrelated()]
            prefills.append(await self._closed("plain", one_token))
        return closed_figures(found, prefills)

    async def open_loop(self) -> dict[str, Any]:
        """All rates one after the other; both arms get the same requests at the same times."""
        bench, found = self.bench, []
        for rate in bench.config.rates:
            both: dict[str, list[Load]] = {name: [] for name in ARMS}
            for _, order in rounds(ARMS, bench.config.repeats, warms_up=False):
                sequence = self._mixed()
                arrivals = poisson_arrivals(bench.rng, len(sequence), per_s=rate)
                for name in order:
                    both[name].append(await play_open(self._client(name), sequence, arrivals))
                    await bench.settle()
            found.append(open_figures(rate, both))
        await bench.watch.look()
        return {"open_loop": found}

    def _client(self, name: str) -> Client:
        return self.bench.plain if name == "plain" else self.bench.proxy

    def _mixed(self) -> list[Request]:
        rng, config = self.bench.rng, self.bench.config
        if self.given is None:
            return new_sequence(rng, config, self.donors, num_requests=config.requests)
        own = self.given.prompts[self.num_sent : self.num_sent + config.requests]
        self.num_sent += config.requests
        return given_sequence(rng, config, own)

    def _unrelated(self) -> list[Request]:
        config = self.bench.config
        return new_sequence(self.bench.rng, config, [], num_requests=config.unrelated_requests)

    async def _closed(self, name: str, sequence: Sequence[Request]) -> Load:
        """One arm. It ends when all is stored, so that the next arm does not pay for it."""
        bench, servers = self.bench, self.bench.servers
        serving = (servers.plain,) if name == "plain" else (servers.shared, servers.proxy)
        before = sum(server.cpu_seconds() for server in serving)
        load = await play(self._client(name), sequence, concurrency=bench.config.concurrency)
        await asyncio.sleep(_AFTERWARDS_S)
        cpu_s = sum(server.cpu_seconds() for server in serving) - before
        await bench.settle()
        # Each prompt sees only itself, so operations are counted prompt by prompt.
        computed = [computed_spans(each) for each in await bench.watch.look()]
        if name == "plain":
            pairs = zip(load.requests, load.answers, strict=True)
            computed = [(Span(answer.num_cached, len(request.prompt)),) for request, answer in pairs]
        return replace(load, cpu_s=cpu_s, flops=sum(map(servers.options.model_size.flops, computed)))
