"""
`kvshare bench load --engine vllm`: throughput and latency under a closed loop of concurrent clients.

Two kinds of traffic, each as the same sequence of requests to both arms, stock vLLM with its prefix cache and
vLLM with KVShare behind the proxy, turn and turn about:
    mixed       half edits of a few popular prompts, the first edit near the top, half strangers; with a
                workload the prompts of that file in its order instead, the next ones in each repeat
    unrelated   strangers only: what sharing costs where there is nothing to share
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.figures import percentiles
from kvshare.bench.harness import median
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Answer, Client
from kvshare.bench.vllm.reports import watching
from kvshare.bench.vllm.stack import EditedConfig, Stack, StackOptions, document, stack
from kvshare.bench.vllm.workload import FilePrompts, read_prompts

_ARMS = ("plain", "shared")


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    """Output lengths are even in [min_output, max_output]."""

    concurrency: int = 8
    requests: int = 32  # per arm and repeat, mixed
    families: int = 4  # popular prompts
    min_output: int = 16
    max_output: int = 32
    repeats: int = 1
    workload: Path | None = None  # a file whose prompts take the place of made-up ones

    @property
    def unrelated_requests(self) -> int:
        return max(self.concurrency, self.requests // 2)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "unrelated_requests": self.unrelated_requests}

    def draw_output(self, rng: np.random.Generator) -> int:
        """The length of one answer."""
        return int(rng.integers(self.min_output, self.max_output + 1))


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a sequence. `is_near`: of a donor that was served before; None where nobody says."""

    prompt: TokenIds
    max_tokens: int
    is_near: bool | None


def run(config: Config) -> dict[str, Any]:
    """
    Ratios are medians over `repeats` sequences, each new to all servers.

    Raises:  EngineError, and LogError where the workload cannot be sent
    """
    given = None
    if config.workload is not None:
        num_prompts = config.repeats * config.requests
        given = read_prompts(config.workload, num_prompts=num_prompts, max_tokens=config.prompt_tokens)
    vllm = replace(
        config.vllm,
        max_model_len=config.prompt_tokens + config.max_output + 32,
        max_num_batched_tokens=640,  # short prefills must not wait for a whole long one, see docs/log.md
        long_prefill_tokens=min(512, config.prompt_tokens),
    )
    with stack(StackOptions(vllm=vllm, kv_bytes=2 * 2**30, seed=config.seed)) as servers:
        return asyncio.run(measure(servers, config, given))


async def measure(servers: Stack, config: Config, given: FilePrompts | None = None) -> dict[str, Any]:
    """The same over servers that run already. `given`: `requests` prompts for each repeat."""
    rng = np.random.default_rng(config.seed)
    donors = [config.stranger(rng) for _ in range(config.families)]
    loads: dict[str, _Loads] = {kind: {name: [] for name in _ARMS} for kind in ("mixed", "unrelated")}
    async with servers.clients() as (plain, proxy), servers.control() as control:
        clients = {"plain": plain, "shared": proxy}
        donated = [Request(donor, config.min_output, is_near=False) for donor in donors]
        for client in clients.values():
            await play(client, donated, concurrency=config.concurrency)
        await reports.settle(proxy)
        async with watching(control) as watch:
            for repeat in range(config.repeats):
                if given is None:
                    sequence = new_sequence(rng, config, donors, num_requests=config.requests)
                else:
                    own = given.prompts[repeat * config.requests : (repeat + 1) * config.requests]
                    sequence = given_sequence(rng, config, own)
                await _both(clients, loads["mixed"], sequence, config)
                strangers = new_sequence(rng, config, [], num_requests=config.unrelated_requests)
                await _both(clients, loads["unrelated"], strangers, config)
    summary = {
        **document("load", servers.options, config),
        **_ratios(loads),
        **{kind: {name: figures(own) for name, own in both.items()} for kind, both in loads.items()},
        "decisions": watch.decisions,
    }
    return summary if given is None else {**summary, "workload": given.description}


async def _both(clients: dict[str, Client], loads: _Loads, sequence: list[Request], config: Config) -> None:
    """The other arm first each time, and none pays for what the other left to do."""
    order = _ARMS if len(loads["plain"]) % 2 else tuple(reversed(_ARMS))
    for name in order:
        loads[name].append(await play(clients[name], sequence, concurrency=config.concurrency))
        await reports.settle(clients["shared"])


def _ratios(loads: Mapping[str, _Loads]) -> dict[str, Any]:
    """Shared over plain, per repeat and in the middle: requests a second, and median time to first token."""
    throughput, ttft = {}, {}
    for kind, both in loads.items():
        pairs = list(zip(both["shared"], both["plain"], strict=True))
        throughput[kind] = [shared.completed_per_s / plain.completed_per_s for shared, plain in pairs]
        ttft[kind] = [median(shared.ttft_s()) / median(plain.ttft_s()) for shared, plain in pairs]
    return {
        "throughput_ratio": median(throughput["mixed"]),
        "ttft_p50_ratio": median(ttft["mixed"]),
        "unrelated_loss": 1 - median(throughput["unrelated"]),
        "unrelated_ttft_loss": median(ttft["unrelated"]) - 1,
        "ratios": {
            "throughput": throughput["mixed"],
            "ttft_p50": ttft["mixed"],
            "unrelated_throughput": throughput["unrelated"],
            "unrelated_ttft_p50": ttft["unrelated"],
        },
    }


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


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a sequence: all answers in its order, and how long it took."""

    requests: Sequence[Request]
    answers: Sequence[Answer]
    seconds: float

    @property
    def completed_per_s(self) -> float:
        return len(self.answers) / self.seconds

    def ttft_s(self, *, is_near: bool | None = None) -> list[float]:
        return [
            answer.ttft_s
            for request, answer in zip(self.requests, self.answers, strict=True)
            if is_near is None or request.is_near is is_near
        ]

    @property
    def gaps_s(self) -> list[float]:
        return [gap for answer in self.answers for gap in answer.gaps_s]


_Loads = dict[str, list[Load]]  # by arm, of each repeat


async def play(client: Client, requests: Sequence[Request], *, concurrency: int) -> Load:
    """Every client asks for the next request as soon as its last one is answered."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(requests))

    async def one_client() -> None:
        for index, request in waiting:
            answers[index] = await client.complete(request.prompt, max_tokens=request.max_tokens)

    began = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    seconds = time.perf_counter() - began
    return Load(requests, [answers[index] for index in range(len(requests))], seconds)


def figures(loads: Sequence[Load]) -> dict[str, Any]:
    """Of one arm over all repeats."""
    kinds = {"all": None, "near": True, "unrelated": False}
    ttft = {name: [s for load in loads for s in load.ttft_s(is_near=kind)] for name, kind in kinds.items()}
    gaps = [gap for load in loads for gap in load.gaps_s]
    return {
        "requests": sum(len(load.answers) for load in loads),
        "completed_per_s": [load.completed_per_s for load in loads],
        "ttft": {name: percentiles(values) for name, values in ttft.items() if values},
        "inter_token": percentiles(gaps) if gaps else None,
    }
