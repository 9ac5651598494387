"""
`kvshare bench burst --engine vllm`: near-duplicates that arrive at once, with nothing stored.

    burst   all at once through the proxy: one is computed, the others wait until it is prefilled, and copy
    warm    the same prompts' kind, the first of them answered and stored before the others come
    full    all at once to stock vLLM with its prefix cache

Times as in `kvshare.bench.burst`, over real sockets. Answers run on behind the first token: others copy from
a prompt whose answer is not over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.burst import ARMS, ratios, time_of
from kvshare.bench.harness import rounds
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Answer, Client
from kvshare.bench.vllm.stack import EditedConfig, Stack, StackOptions, document, stack

_ROOM = 128  # tokens of context beyond the prompt


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    concurrency: int = 8
    max_tokens: int = 16
    repeats: int = 3


def run(config: Config) -> dict[str, Any]:
    """Medians over `repeats` bursts, each new to all servers."""
    vllm = replace(config.vllm, max_model_len=config.prompt_tokens + _ROOM, kv_cache_gib=2)
    with stack(StackOptions(vllm=vllm, seed=config.seed)) as servers:
        return asyncio.run(measure(servers, config))


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """The same over servers that run already."""
    rng = np.random.default_rng(config.seed)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    reused: dict[str, list[float]] = {name: [] for name in ARMS}
    async with servers.clients() as (plain, proxy):
        for counts, order in rounds(ARMS, config.repeats):
            for name in order:
                base = config.stranger(rng)
                prompts = [config.edited(rng, base) for _ in range(config.concurrency)]
                answers = await _served(name, plain if name == "full" else proxy, prompts, config.max_tokens)
                await reports.settle(proxy)
                if counts:
                    seconds[name].append(time_of(name, [answer.ttft_s for answer in answers]))
                    num_cached = sum(answer.num_cached for answer in answers)
                    reused[name].append(num_cached / sum(map(len, prompts)))
    return {**document("burst", servers.options, config), **ratios(seconds, reused)}


async def _served(arm: str, client: Client, prompts: Sequence[TokenIds], max_tokens: int) -> list[Answer]:
    first: list[Answer] = []
    if arm == "warm":
        first.append(await client.complete(prompts[0], max_tokens=max_tokens))
        await reports.settle(client)
    others = (client.complete(prompt, max_tokens=max_tokens) for prompt in prompts[len(first) :])
    return first + await asyncio.gather(*others)
