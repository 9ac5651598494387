"""
`kvshare bench soak --engine vllm`: minutes of mixed traffic, in which every exact answer must be vLLM's own.

Float32 on a small model, a KV cache so small that requests are preempted, clients that hang up, prompts that
are evicted while others plan with them. The reference of each prompt is stock vLLM's greedy answer. What may
be approximate (mode approx, and a relative was served) is only counted, with how far it agrees.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Answer, Client, connected
from kvshare.bench.vllm.prompts import Mixture, Op
from kvshare.bench.vllm.reports import watching
from kvshare.bench.vllm.stack import ALWAYS_SHARE, BenchConfig, Stack, StackOptions, document, stack
from kvshare.errors import EngineError

_MAX_EXAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    minutes: float = 5.0
    concurrency: int = 6
    min_prompt: int = 150
    max_prompt: int = 600
    output_tokens: int = 48
    max_prompts: int = 24  # remembered, to come back to
    evict_every: int = 25  # requests
    tie_margin: float = 1e-3  # log-probability between first and second choice; other batches round otherwise

    @property
    def max_model_len(self) -> int:
        return 2 * self.max_prompt + self.output_tokens


def run(config: Config) -> dict[str, Any]:
    """Counts of right, wrong, tied and approximate answers. `passed`: none wrong, none failed."""
    with stack(_stack_options(config)) as servers:
        return asyncio.run(measure(servers, config))


def _stack_options(config: Config) -> StackOptions:
    """A KV cache that holds little more than half of what the clients ask for at a time."""
    block_size = 32
    wanted = config.concurrency * (config.max_prompt + config.output_tokens) * 0.55
    vllm = replace(
        config.vllm,
        dtype="float32",
        max_model_len=config.max_model_len,
        max_num_batched_tokens=512,
        num_blocks=int(max(wanted, config.max_model_len + block_size)) // block_size + 1,
        block_size=block_size,
    )
    return StackOptions("small", vllm, kv_bytes=32 * 2**20, proxy_settings=ALWAYS_SHARE, seed=config.seed)


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """The same over servers that run already."""
    async with servers.clients() as (plain, proxy), servers.control() as control:
        before = await reports.read_counters(proxy)
        soak = _Soak(config, plain, proxy)
        async with watching(control) as watch:
            await soak.run()
        counted = (await reports.read_counters(proxy)).since(before)
        preemptions = await _preemptions(servers)
    return {
        **document("soak", servers.options, config),
        **soak.summary(),
        "evicted_segments": watch.num_dropped,
        "preemptions": preemptions,
        "within_bytes": watch.peak_bytes <= watch.max_bytes,
        "decisions": watch.decisions,
        "lookups": counted.lookups,
        "tokens_by_source": counted.by("kvshare_prompt_tokens_by_source_total", "source"),
    }


class _Soak:
    """Clients that draw operations until the time is over, and what the answers came to."""

    def __init__(self, config: Config, plain: Client, proxy: Client) -> None:
        self._config = config
        self._plain = plain
        self._proxy = proxy
        self._rng = np.random.default_rng(config.seed)
        self._mixture = Mixture(
            self._rng,
            min_prompt=config.min_prompt,
            max_prompt=config.max_prompt,
            max_prompts=config.max_prompts,
        )
        self._references: dict[bytes, asyncio.Task[Answer]] = {}
        self._ops: Counter[str] = Counter()
        self._verdicts: Counter[str] = Counter()
        self._agreements: list[float] = []  # of answers that may be approximate
        self._examples: list[dict[str, Any]] = []
        self._errors: Counter[str] = Counter()
        self._num_evictions = 0

    async def run(self) -> None:
        deadline = time.monotonic() + 60 * self._config.minutes

        async def one_client() -> None:
            while time.monotonic() < deadline:
                await self._one(self._mixture.draw())

        await asyncio.gather(*(one_client() for _ in range(self._config.concurrency)))

    async def _one(self, op: Op) -> None:
        self._ops[f"{op.kind}:{op.mode}" + (":abort" if op.aborts else "")] += 1
        try:
            answer = await self._asked(op)
            if answer is not None:
                reference, margin = await self._reference(op), self._config.tie_margin
                self._count(op, judge(answer, reference, aborted=answer.aborted, tie_margin=margin))
        except EngineError as exc:
            self._errors[str(exc)[:200]] += 1
        self._mixture.remember(op.prompt)
        if sum(self._ops.values()) % self._config.evict_every == 0:
            await self._evict()

    async def _asked(self, op: Op) -> Answer | None:
        """None: hung up before the first token."""
        asking = self._proxy.complete(
            op.prompt,
            max_tokens=self._config.output_tokens,
            num_top=2,
            extra={"kvshare": {"mode": op.mode}},
            abort_after=op.abort_after,
        )
        try:
            return await asyncio.wait_for(asking, op.abort_s)  # None: as long as it takes
        except TimeoutError:
            return None

    async def _reference(self, op: Op) -> Answer:
        """Stock vLLM's answer; asked once per prompt."""
        key = op.prompt.tobytes()
        if key not in self._references:
            asking = self._plain.complete(op.prompt, max_tokens=self._config.output_tokens, num_top=2)
            self._references[key] = asyncio.create_task(asking)
        return await self._references[key]

    def _count(self, op: Op, verdict: Verdict) -> None:
        if op.may_be_approximate:
            self._verdicts["approximate"] += 1
            self._agreements.append(verdict.agreement)
            return
        self._verdicts[verdict.name] += 1
        if verdict.name != "right" and len(self._examples) < _MAX_EXAMPLES:
            self._examples.append(
                {"kind": op.kind, "mode": op.mode, "prompt_tokens": len(op.prompt), **asdict(verdict)}
            )

    async def _evict(self) -> None:
        """Everything now and then, else one prompt that is stored."""
        self._num_evictions += 1
        if self._rng.random() < 0.1:
            await reports.evict_all(self._proxy)
        else:
            await reports.evict_one(self._proxy, self._rng)

    def summary(self) -> dict[str, Any]:
        num_wrong, num_errors = self._verdicts["wrong"], sum(self._errors.values())
        return {
            "passed": num_wrong == 0 and num_errors == 0,
            "requests": sum(self._ops.values()),
            "wrong_outputs": num_wrong,
            "ties": self._verdicts["tied"],
            "right_outputs": self._verdicts["right"],
            "approximate_outputs": self._verdicts["approximate"],
            "approximate_agreement": fmean(self._agreements) if self._agreements else None,
            "aborted": sum(count for op, count in self._ops.items() if op.endswith(":abort")),
            "failed": dict(self._errors),
            "evictions": self._num_evictions,
            "ops": dict(sorted(self._ops.items())),
            "examples": self._examples,
        }


async def _preemptions(servers: Stack) -> dict[str, float]:
    found = {}
    for server in (servers.plain, servers.shared):
        async with connected(server.url) as client:
            counted = await reports.read_counters(client)
        found[server.name] = counted.total("vllm:num_preemptions_total")
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """`name`: right, tied or wrong. `agreement`: share of the answer's tokens before the first difference."""

    name: str
    agreement: float
    first_difference: int | None = None
    margin: float | None = None  # of the reference, where they part
    logprob_error: float = 0.0  # largest, over the tokens before


def judge(
    answer: Answer, reference: Answer, *, aborted: bool = False, tie_margin: float = Config.tie_margin
) -> Verdict:
    """Compare with a full reference. An aborted answer must be its beginning."""
    found, expected = answer.token_ids, reference.token_ids
    common = min(len(found), len(expected))
    parted = next((place for place in range(common) if found[place] != expected[place]), None)
    same = common if parted is None else parted
    pairs = zip(answer.logprobs[:same], reference.logprobs[:same], strict=True)
    error = max((abs(one - other) for one, other in pairs), default=0.0)
    if parted is not None:
        margin = reference.margins[parted]
        name = "tied" if margin < tie_margin else "wrong"
        return Verdict(name, parted / len(found), parted, margin, error)
    if len(found) == len(expected) or (aborted and len(found) < len(expected)):
        return Verdict("right", 1.0, logprob_error=error)
    return Verdict("wrong", common / max(1, len(found)), common, None, error)
