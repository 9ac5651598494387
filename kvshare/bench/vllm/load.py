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
from dataclasses import replace
from typing import Any

import numpy as np

from kvshare.bench.harness import median
from kvshare.bench.vllm import front
from kvshare.bench.vllm.client import Client
from kvshare.bench.vllm.control import watching
from kvshare.bench.vllm.prompts import stranger
from kvshare.bench.vllm.stack import Stack, StackOptions, document, stack
from kvshare.bench.vllm.traffic import Config, Load, Request, figures, given_sequence, new_sequence, play
from kvshare.bench.vllm.workload import FilePrompts, read_prompts

_ARMS = ("plain", "shared")


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
                    sequence = new_sequence(rng, config, donors, num_requests=config.requests)
                else:
                    own = given.prompts[repeat * config.requests : (repeat + 1) * config.requests]
                    sequence = given_sequence(rng, config, own)
                await _both(clients, mixed, sequence, config)
                strangers = new_sequence(rng, config, [], num_requests=config.unrelated_requests)
                await _both(clients, unrelated, strangers, config)
    summary = _summary(servers, config, mixed, unrelated, watch.decisions)
    return summary if given is None else {**summary, "workload": given.to_json()}


async def _both(
    clients: dict[str, Client], loads: dict[str, list[Load]], sequence: list[Request], config: Config
) -> None:
    """The other arm first each time, and none pays for what the other left to do."""
    order = _ARMS if len(loads["plain"]) % 2 else tuple(reversed(_ARMS))
    for name in order:
        loads[name].append(await play(clients[name], sequence, concurrency=config.concurrency))
        await front.settle(clients["shared"])


def _summary(
    servers: Stack,
    config: Config,
    mixed: dict[str, list[Load]],
    unrelated: dict[str, list[Load]],
    decisions: dict[str, int],
) -> dict[str, Any]:
    throughput, ttft = _ratios(mixed)
    lost_throughput, lost_ttft = _ratios(unrelated)
    return {
        **document("load", servers.options, config),
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
