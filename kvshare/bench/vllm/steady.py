"""
`kvshare bench steady --engine vllm`: whether sharing still pays once the store is full and has to evict.

Batches of prompts nobody has asked before: edits of popular prompts, and edits of such edits of the batch
before. Between them come strangers through the proxy, which fill the store, and strangers straight to stock
vLLM: the full prefill of the same minute, which the batch is compared with. Two batches go first
unmeasured, which fill the store, and chains are of two edits in every batch: the work must not change with
the batch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.figures import trend
from kvshare.bench.random_models import timing_bytes_per_token
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Client
from kvshare.bench.vllm.reports import Watch, watching
from kvshare.bench.vllm.stack import EditedConfig, Stack, StackOptions, document, stack

_ROOM = 64  # tokens of context beyond the prompt
_FILLING = 2  # batches before the first measured one


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    batches: int = 12
    recipients: int = 8  # per batch: half edits of popular prompts, half edits of the last batch's such edits
    strangers: int = 2  # per batch, through the proxy
    families: int = 2  # popular prompts
    kv_bytes: int | None = None  # of the store; None: for `capacity_tokens`

    @property
    def capacity_tokens(self) -> int:
        """
        Of a store that is full in the second batch: the popular prompts, and what 2.5 batches add.

        A recipient is taken to add a fifth of its tokens, its changes and their repair.
        """
        added = self.strangers + self.recipients / 5
        return int((self.families + 2.5 * added) * self.prompt_tokens)


@dataclass(slots=True)
class _Batch:
    full_s: list[float] = field(default_factory=list)
    popular_s: list[float] = field(default_factory=list)  # recipients of popular donors
    recent_s: list[float] = field(default_factory=list)  # recipients of the last batch's
    computed: list[int] = field(default_factory=list)  # tokens per recipient
    num_bytes: int = 0
    num_dropped: int = 0

    @property
    def speedup(self) -> float:
        """Of means: a recipient that found no donor any more counts."""
        return float(np.mean(self.full_s) / np.mean(self.popular_s + self.recent_s))


def run(config: Config) -> dict[str, Any]:
    """
    Speedup of every batch, mean full prefill over mean time to first token of its recipients.

    `last3_over_first3`: mean speedup of the last three batches over that of the first three.
    `trend_per_batch`: relative change of the speedup from a batch to the next, with its 95 % interval.
    """
    capacity = config.capacity_tokens * timing_bytes_per_token(config.dtype)
    vllm = replace(config.vllm, max_model_len=config.prompt_tokens + _ROOM)
    with stack(StackOptions(vllm=vllm, kv_bytes=config.kv_bytes or capacity, seed=config.seed)) as servers:
        return asyncio.run(measure(servers, config))


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """The same over servers that run already, with the store they have."""
    rng = np.random.default_rng(config.seed)
    popular = [config.stranger(rng) for _ in range(config.families)]
    async with servers.clients() as (plain, proxy), servers.control() as control:
        for prompt in popular:
            await plain.complete(config.stranger(rng))  # warm
            await proxy.complete(prompt)
        await reports.settle(proxy)
        batches: list[_Batch] = []
        last: list[TokenIds] = popular
        async with watching(control) as watch:
            for _ in range(config.batches + _FILLING):
                prompts = _recipients(rng, config, popular, last)
                batches.append(await _batch(plain, proxy, prompts, rng, config, watch))
                last = prompts[::2]
    return _summary(servers, config, batches[_FILLING:], watch)


def _recipients(
    rng: np.random.Generator, config: Config, popular: list[TokenIds], last: list[TokenIds]
) -> list[TokenIds]:
    """Popular and recent donors in turn."""
    prompts = []
    for number in range(config.recipients):
        donors = last if number % 2 else popular
        donor = donors[int(rng.integers(len(donors)))]
        prompts.append(config.edited(rng, donor))
    return prompts


async def _batch(
    plain: Client,
    proxy: Client,
    prompts: list[TokenIds],
    rng: np.random.Generator,
    config: Config,
    watch: Watch,
) -> _Batch:
    """Recipients one after another; after every few of them a full prefill, and a stranger for the store."""
    batch, dropped_before = _Batch(), watch.num_dropped
    every = max(1, len(prompts) // max(1, config.strangers))
    for number, prompt in enumerate(prompts):
        answer = await proxy.complete(prompt)
        await reports.settle(proxy)
        (batch.recent_s if number % 2 else batch.popular_s).append(answer.ttft_s)
        batch.computed.append(watch.finished[-1].num_computed)
        if number % every == every - 1:
            batch.full_s.append((await plain.complete(config.stranger(rng))).ttft_s)
            await proxy.complete(config.stranger(rng))
            await reports.settle(proxy)
    batch.num_bytes = int((await reports.read_stats(proxy))["num_bytes"])
    batch.num_dropped = watch.num_dropped - dropped_before
    return batch


def _summary(servers: Stack, config: Config, batches: list[_Batch], watch: Watch) -> dict[str, Any]:
    speedups = [batch.speedup for batch in batches]
    return {
        **document("steady", servers.options, config),
        **course(speedups),
        "speedups": speedups,
        "evicts_in_every_batch": all(batch.num_dropped > 0 for batch in batches),
        "evicted_segments": watch.num_dropped,
        "max_bytes": watch.max_bytes,
        "peak_bytes": watch.peak_bytes,
        "within_bytes": watch.peak_bytes <= watch.max_bytes,
        "decisions": watch.decisions,
        "batches": [{**asdict(batch), "speedup": batch.speedup} for batch in batches],
    }


def course(speedups: Sequence[float]) -> dict[str, Any]:
    """How the speedups of the batches change from the first to the last."""
    slope, around = trend(speedups)
    return {
        "last_over_first": speedups[-1] / speedups[0],
        "last3_over_first3": fmean(speedups[-3:]) / fmean(speedups[:3]),
        "trend_per_batch": slope,
        "intervals": {"trend_per_batch": around},
    }
