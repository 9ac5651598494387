"""
`kvshare bench steady --engine vllm`: whether sharing still pays once the store is full and has to evict.

Batches of new prompts: edits of popular prompts, and edits of such edits of the batch before. Between them
come unrelated prompts through the proxy, which fill the store, and unrelated prompts straight to stock vLLM:
the full prefill of the same minute, with which the batch is compared. Two batches that are not measured fill
the store first, and chains are two edits long in every batch, so that all batches are the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from delta_tree import TokenIds
from kvshare_lab.bench.figures import trend
from kvshare_lab.vllm.session import Session, run_benchmark, watching
from kvshare_lab.vllm.stack import EditedConfig, StackOptions

_ROOM = 64  # tokens of context beyond the prompt
_FILLING = 2  # batches before the first measured one


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    batches: int = 12
    recipients: int = 8  # per batch: half edits of popular prompts, half edits of the last batch's such edits
    strangers: int = 2  # unrelated prompts per batch, through the proxy; the name is a key of the document
    families: int = 2  # popular prompts
    kv_bytes: int | None = None  # of the store; None: for `capacity_tokens`

    @property
    def options(self) -> StackOptions:
        capacity = self.capacity_tokens * self.bytes_per_token(self.chosen_model)
        vllm = replace(self.vllm, max_model_len=self.prompt_tokens + _ROOM)
        return replace(self.stack_of(vllm), kv_bytes=self.kv_bytes or capacity)

    @property
    def capacity_tokens(self) -> int:
        """
        Of a store that is full in the second batch: the popular prompts, and what 2.5 batches add.

        A recipient is assumed to add a fifth of its tokens: its changes and their repair.
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
        """Of means: a recipient whose donor was evicted counts."""
        return fmean(self.full_s) / fmean(self.popular_s + self.recent_s)


async def measure(bench: Session[Config]) -> dict[str, Any]:
    """
    Speedup of every batch: mean time of a full prefill over mean time to first token of its recipients.

    `last3_over_first3`: mean speedup of the last three batches over that of the first three.
    `trend_per_batch`: relative change of the speedup from a batch to the next, with its 95 % interval.
    """
    config = bench.config
    popular = [bench.unrelated() for _ in range(config.families)]
    await bench.begin(popular)
    batches, last = [], popular
    async with watching(bench.control) as bench.watch:
        for _ in range(config.batches + _FILLING):
            prompts = []
            for number in range(config.recipients):
                donors = last if number % 2 else popular
                prompts.append(bench.edited(donors[int(bench.rng.integers(len(donors)))]))
            batches.append(await _batch(bench, prompts))
            last = prompts[::2]
    batches, watch = batches[_FILLING:], bench.watch
    speedups = [batch.speedup for batch in batches]
    return {
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


async def _batch(bench: Session[Config], prompts: list[TokenIds]) -> _Batch:
    """Recipients one after another; between them full prefills, and unrelated prompts to store."""
    batch, dropped_before = _Batch(), bench.watch.num_dropped
    every = max(1, len(prompts) // max(1, bench.config.strangers))
    for number, prompt in enumerate(prompts):
        answer = await bench.proxy.complete(prompt)
        await bench.settle()
        (batch.recent_s if number % 2 else batch.popular_s).append(answer.ttft_s)
        batch.computed.append(bench.watch.seen[-1].num_computed)
        if number % every == every - 1:
            batch.full_s.append((await bench.plain.complete(bench.unrelated())).ttft_s)
            await bench.proxy.complete(bench.unrelated())
            await bench.settle()
    batch.num_bytes = int((await bench.stats())["num_bytes"])
    batch.num_dropped = bench.watch.num_dropped - dropped_before
    return batch


def course(speedups: Sequence[float]) -> dict[str, Any]:
    """How the speedups of the batches change from the first to the last."""
    slope, around = trend(speedups)
    return {
        "last_over_first": speedups[-1] / speedups[0],
        "last3_over_first3": fmean(speedups[-3:]) / fmean(speedups[:3]),
        "trend_per_batch": slope,
        "intervals": {"trend_per_batch": around},
    }


run = partial(run_benchmark, "steady", measure)
