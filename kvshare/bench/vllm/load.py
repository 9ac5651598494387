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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvshare.bench.harness import median
from kvshare.bench.vllm import front
from kvshare.bench.vllm.client import Client
from kvshare.bench.vllm.control import watching
from kvshare.bench.vllm.prompts import stranger
from kvshare.bench.vllm.servers import VllmOptions
from kvshare.bench.vllm.stack import Stack, StackOptions, document, stack
from kvshare.bench.vllm.traffic import Load, Request, Shape, figures, given_sequence, new_sequence, play
from kvshare.bench.vllm.workload import FilePrompts, read_prompts

_ARMS = ("plain", "shared")


@dataclass(frozen=True, slots=True)
class LoadConfig:
    concurrency: int = 8
    requests: int = 32  # per arm and repeat, mixed
    unrelated_requests: int = 16
    prompt_tokens: int = 2000
    changed: float = 0.1
    edits: int = 5
    families: int = 4  # popular prompts
    min_output: int = 16
    max_output: int = 32
    repeats: int = 3
    seed: int = 0

    @property
    def shape(self) -> Shape:
        return Shape(self.prompt_tokens, self.changed, self.edits, self.min_output, self.max_output)


def run(
    *,
    concurrency: int = 8,
    requests: int = 32,
    prompt_tokens: int = 2000,
    changed: float = 0.1,
    edits: int = 5,
    repeats: int = 1,
    seed: int = 0,
    workload: Path | None = None,
    threads: int | None = None,
    dtype: str = "bfloat16",
    eager: bool = False,
) -> dict[str, Any]:
    """
    Ratios are medians over `repeats` sequences, each new to all servers.

    Raises:  EngineError, and LogError where the workload cannot be sent
    """
    config = LoadConfig(
        concurrency=concurrency,
        requests=requests,
        unrelated_requests=max(concurrency, requests // 2),
        prompt_tokens=prompt_tokens,
        changed=changed,
        edits=edits,
        repeats=repeats,
        seed=seed,
    )
    given = None
    if workload is not None:
        given = read_prompts(workload, num_prompts=repeats * requests, max_tokens=prompt_tokens)
    vllm = VllmOptions(
        max_model_len=prompt_tokens + config.max_output + 32,
        max_num_batched_tokens=640,  # short prefills must not wait for a whole long one, see docs/log.md
        long_prefill_tokens=min(512, prompt_tokens),
        num_threads=threads,
        dtype=dtype,
        enforce_eager=eager,
    )
    with stack(StackOptions(vllm=vllm, kv_bytes=2 * 2**30, seed=seed)) as servers:
        return measure(servers, config, given)


def measure(servers: Stack, config: LoadConfig, given: FilePrompts | None = None) -> dict[str, Any]:
    """The same over servers that run already. `given`: `requests` prompts for each repeat."""
    return asyncio.run(_measure(servers, config, given))


async def _measure(servers: Stack, config: LoadConfig, given: FilePrompts | None) -> dict[str, Any]:
    rng = np.random.default_rng(config.seed)
    donors = [stranger(rng, config.prompt_tokens) for _ in range(config.families)]
    mixed: dict[str, list[Load]] = {name: [] for name in _ARMS}
    unrelated: dict[str, list[Load]] = {name: [] for name in _ARMS}
    async with servers.clients() as (plain, proxy), servers.control() as control:
        clients = {"plain": plain, "shared": proxy}
        donated = [Request(donor, config.min_output, is_near=False) for donor in donors]
        for client in clients.values():
            await play(client, donated, concurrency=config.concurrency)
        await front.settle(proxy)
        async with watching(control) as watch:
            for repeat in range(config.repeats):
                if given is None:
                    sequence = _sequence(rng, config, donors, config.requests)
                else:
                    own = given.prompts[repeat * config.requests : (repeat + 1) * config.requests]
                    sequence = given_sequence(rng, config.shape, own)
                await _both(clients, mixed, sequence, config)
                strangers = _sequence(rng, config, [], config.unrelated_requests)
                await _both(clients, unrelated, strangers, config)
    summary = _summary(servers, config, mixed, unrelated, watch.decisions)
    return summary if given is None else {**summary, "workload": given.to_json()}


def _sequence(
    rng: np.random.Generator, config: LoadConfig, donors: Sequence[Any], num_requests: int
) -> list[Request]:
    near_share = 0.5 if donors else 0.0
    return new_sequence(rng, config.shape, donors, num_requests=num_requests, near_share=near_share)


async def _both(
    clients: dict[str, Client], loads: dict[str, list[Load]], sequence: list[Request], config: LoadConfig
) -> None:
    """The other arm first each time, and none pays for what the other left to do."""
    order = _ARMS if len(loads["plain"]) % 2 else tuple(reversed(_ARMS))
    for name in order:
        loads[name].append(await play(clients[name], sequence, concurrency=config.concurrency))
        await front.settle(clients["shared"])


def _summary(
    servers: Stack,
    config: LoadConfig,
    mixed: dict[str, list[Load]],
    unrelated: dict[str, list[Load]],
    decisions: dict[str, int],
) -> dict[str, Any]:
    throughput, ttft = _ratios(mixed)
    lost_throughput, lost_ttft = _ratios(unrelated)
    return {
        **document("load", servers.options, asdict(config)),
        "throughput_ratio": median(throughput),
        "ttft_p50_ratio": median(ttft),
        "unrelated_loss": 1 - median(lost_throughput),
        "unrelated_ttft_loss": median(lost_ttft) - 1,
        "ratios": {
            "throughput": throughput,
            "ttft_p50": ttft,
            "unrelated_throughput": lost_throughput,
            "unrelated_ttft_p50": lost_ttft,
        },
        "mixed": {name: figures(loads) for name, loads in mixed.items()},
        "unrelated": {name: figures(loads) for name, loads in unrelated.items()},
        "decisions": decisions,
    }


def _ratios(loads: dict[str, list[Load]]) -> tuple[list[float], list[float]]:
    """Shared over plain, per repeat: completed requests a second, and median time to first token."""
    pairs = list(zip(loads["shared"], loads["plain"], strict=True))
    throughput = [shared.completed_per_s / plain.completed_per_s for shared, plain in pairs]
    ttft = [median(shared.ttft_s()) / median(plain.ttft_s()) for shared, plain in pairs]
    return throughput, ttft
