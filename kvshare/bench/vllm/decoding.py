"""
Time between tokens of streams that decode, while other requests arrive one after another:

    quiet   nothing else
    full    prompts that nobody has seen, without sharing
    saves   such prompts through the proxy: their KV is saved
    loads   near-duplicates of a stored prompt: KV is loaded, what is missing computed, and that saved
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.figures import percentiles
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Answer, Client, connected
from kvshare.bench.vllm.prompts import stranger
from kvshare.bench.vllm.stack import EditedConfig, Stack

ARMS = ("quiet", "full", "saves", "loads")
STREAM_PROMPT = 32  # tokens: short, as its prefill is not what is looked at


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    streams: int = 8
    output_tokens: int = 128
    repeats: int = 3


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """Percentiles of each arm, and the 99th and the longest over those of `quiet`."""
    rng = np.random.default_rng(config.seed)
    donor = config.stranger(rng)
    gaps: dict[str, list[float]] = {name: [] for name in ARMS}
    arrived: dict[str, int] = dict.fromkeys(ARMS, 0)
    async with servers.clients() as (_, proxy), connected(servers.shared.url) as straight:
        await proxy.complete(donor)
        await reports.settle(proxy)
        arrivals: dict[str, Callable[[], Awaitable[Answer]]] = {
            "full": lambda: straight.complete(config.stranger(rng)),
            "saves": lambda: proxy.complete(config.stranger(rng)),
            "loads": lambda: proxy.complete(config.edited(rng, donor)),
        }
        for repeat in range(config.repeats + 1):
            for name in ARMS if repeat % 2 else reversed(ARMS):
                prompts = [stranger(rng, STREAM_PROMPT) for _ in range(config.streams)]
                answers, number = await _decoded(straight, prompts, config.output_tokens, arrivals.get(name))
                await reports.settle(proxy)
                if repeat:  # the first warms up
                    gaps[name] += [gap for answer in answers for gap in answer.gaps_s]
                    arrived[name] += number
    return summary(gaps, arrived)


async def _decoded(
    client: Client,
    prompts: Sequence[TokenIds],
    num_tokens: int,
    arrive: Callable[[], Awaitable[Answer]] | None,
) -> tuple[list[Answer], int]:
    """The streams' answers, and how many requests arrived while all of them decoded."""
    decoding = asyncio.gather(*(client.complete(prompt, max_tokens=num_tokens) for prompt in prompts))
    number = 0
    while arrive is not None and not decoding.done():
        await arrive()
        number += 1
    return await decoding, number


def summary(gaps: dict[str, list[float]], arrived: dict[str, int]) -> dict[str, Any]:
    """Of all gaps of each arm, and each arm over `quiet`."""
    # Where the client reads late several tokens come at once: the mean does not change with that.
    arms = {name: {"mean_ms": 1e3 * fmean(values), **percentiles(values)} for name, values in gaps.items()}
    quiet = arms["quiet"]
    return {
        "mean_ratio": {name: arms[name]["mean_ms"] / quiet["mean_ms"] for name in ARMS[1:]},
        "p99_ratio": {name: arms[name]["p99_ms"] / quiet["p99_ms"] for name in ARMS[1:]},
        "max_ratio": {name: arms[name]["max_ms"] / quiet["max_ms"] for name in ARMS[1:]},
        "arms": arms,
        "arrivals": arrived,
    }
