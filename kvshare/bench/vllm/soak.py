"""
`kvshare bench soak --engine vllm`: minutes of mixed traffic, in which every exact answer must be vLLM's own.

Float32 on a small model, a KV cache so small that requests are preempted, clients that hang up, prompts that
are evicted while others plan with them. The reference of each prompt is stock vLLM's greedy answer. Answers
that may be approximate (mode approx, and not an unrelated prompt) are only counted, with how far they agree.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from kvshare.bench.fidelity.measures import num_agreed
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Answer, Client, connected
from kvshare.bench.vllm.prompts import Mixture, Op
from kvshare.bench.vllm.reports import watching
from kvshare.bench.vllm.session import run_benchmark
from kvshare.bench.vllm.stack import ALWAYS_SHARE, BenchConfig, Stack, StackOptions, stack
from kvshare.errors import EngineError

_MAX_EXAMPLES = 10
_BLOCK_SIZE = 32
_EVICT_ALL = 0.1  # share of the evictions


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    minutes: float = 5.0
    concurrency: int = 6
    min_prompt: int = 150
    max_prompt: int = 600
    output_tokens: int = 48
    max_prompts: int = 24  # from which later requests are made
    evict_every: int = 25  # requests
    tie_margin: float = 1e-3  # log-probability between first and second choice; other batches round otherwise

    @property
    def max_model_len(self) -> int:
        return 2 * self.max_prompt + self.output_tokens

    @property
    def options(self) -> StackOptions:
        """A KV cache for little more than half of what the clients ask for at a time."""
        wanted = self.concurrency * (self.max_prompt + self.output_tokens) * 0.55
        vllm = replace(
            self.vllm,
            dtype="float32",
            max_model_len=self.max_model_len,
            max_num_batched_tokens=512,
            num_blocks=int(max(wanted, self.max_model_len + _BLOCK_SIZE)) // _BLOCK_SIZE + 1,
            block_size=_BLOCK_SIZE,
        )
        return StackOptions("small", vllm, kv_bytes=32 * 2**20, proxy_settings=ALWAYS_SHARE, seed=self.seed)


def run(config: Config) -> dict[str, Any]:
    """Counts of right, wrong, tied and approximate answers. `passed`: none wrong, none failed."""
    return run_benchmark("soak", config, measure, stack)


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """The same over servers that run already, without the head of the document."""
    async with servers.clients() as (plain, proxy), servers.control() as control:
        before = await reports.read_counters(proxy)
        soak = _Soak(config, plain, proxy)
        async with watching(control) as watch:
            await soak.run()
        counted = (await reports.read_counters(proxy)).since(before)
    preemptions = {}
    for server in (servers.plain, servers.shared):
        async with connected(server.url) as client:
            counters = await reports.read_counters(client)
        preemptions[server.name] = counters.total("vllm:num_preemptions_total")
    return {
        **soak.summary(),
        "evicted_segments": watch.num_dropped,
        "preemptions": preemptions,
        "within_bytes": watch.peak_bytes <= watch.max_bytes,
        "decisions": watch.decisions,
        "lookups": counted.lookups,
        "tokens_by_source": counted.by("kvshare_prompt_tokens_by_source_total", "source"),
    }


@dataclass(slots=True)
class _Soak:
    """Clients that send requests until the time is over, and the verdicts on their answers."""

    config: Config
    plain: Client
    proxy: Client
    rng: np.random.Generator = field(init=False)
    mixture: Mixture = field(init=False)
    references: dict[bytes, asyncio.Task[Answer]] = field(default_factory=dict)
    ops: Counter[str] = field(default_factory=Counter)
    verdicts: Counter[str] = field(default_factory=Counter)
    agreements: list[float] = field(default_factory=list)  # of answers that may be approximate
    examples: list[Mapping[str, Any]] = field(default_factory=list)  # of answers that are not right
    errors: Counter[str] = field(default_factory=Counter)
    num_evictions: int = 0

    def __post_init__(self) -> None:
        config, self.rng = self.config, np.random.default_rng(self.config.seed)
        self.mixture = Mixture(
            self.rng,
            min_prompt=config.min_prompt,
            max_prompt=config.max_prompt,
            max_prompts=config.max_prompts,
        )

    async def run(self) -> None:
        deadline = time.monotonic() + 60 * self.config.minutes

        async def one_client() -> None:
            while time.monotonic() < deadline:
                await self._one(self.mixture.draw())

        await asyncio.gather(*(one_client() for _ in range(self.config.concurrency)))

    async def _one(self, op: Op) -> None:
        self.ops[f"{op.kind}:{op.mode}" + (":abort" if op.aborts else "")] += 1
        try:
            answer = await self._asked(op)
            if answer is not None:
                self._count(op, judge(answer, await self._reference(op), tie_margin=self.config.tie_margin))
        except EngineError as exc:
            self.errors[str(exc)[:200]] += 1
        self.mixture.remember(op.prompt)
        if self.ops.total() % self.config.evict_every == 0:
            self.num_evictions += 1
            if self.rng.random() < _EVICT_ALL:
                await self.proxy.post("/admin/evict", {"all": True, "dry_run": False})
            else:
                await reports.evict_one(self.proxy, self.rng)

    async def _asked(self, op: Op) -> Answer | None:
        """None where the client hung up before the first token."""
        asking = self.proxy.complete(
            op.prompt,
            max_tokens=self.config.output_tokens,
            num_top=2,
            extra={"kvshare": {"mode": op.mode}},
            abort_after=op.abort_after,
        )
        try:
            return await asyncio.wait_for(asking, op.abort_s)
        except TimeoutError:
            return None

    async def _reference(self, op: Op) -> Answer:
        """Stock vLLM's answer; each prompt is sent to it once."""
        key = op.prompt.tobytes()
        if key not in self.references:
            asking = self.plain.complete(op.prompt, max_tokens=self.config.output_tokens, num_top=2)
            self.references[key] = asyncio.create_task(asking)
        return await self.references[key]

    def _count(self, op: Op, verdict: Verdict) -> None:
        if op.may_be_approximate:
            self.verdicts["approximate"] += 1
            self.agreements.append(verdict.agreement)
            return
        self.verdicts[verdict.name] += 1
        if verdict.name != "right" and len(self.examples) < _MAX_EXAMPLES:
            asked = {"kind": op.kind, "mode": op.mode, "prompt_tokens": len(op.prompt)}
            self.examples.append({**asked, **asdict(verdict)})

    def summary(self) -> dict[str, Any]:
        num_wrong = self.verdicts["wrong"]
        return {
            "passed": num_wrong == 0 and not self.errors,
            "requests": self.ops.total(),
            "wrong_outputs": num_wrong,
            "ties": self.verdicts["tied"],
            "right_outputs": self.verdicts["right"],
            "approximate_outputs": self.verdicts["approximate"],
            "approximate_agreement": fmean(self.agreements) if self.agreements else None,
            "aborted": sum(count for op, count in self.ops.items() if op.endswith(":abort")),
            "failed": dict(self.errors),
            "evictions": self.num_evictions,
            "ops": dict(sorted(self.ops.items())),
            "examples": self.examples,
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """`name`: right, tied or wrong. `agreement`: share of the answer's tokens before the first difference."""

    name: str
    agreement: float
    first_difference: int | None = None
    margin: float | None = None  # of the reference, at the first difference
    logprob_error: float = 0.0  # largest, over the tokens before


def judge(answer: Answer, reference: Answer, *, tie_margin: float = Config.tie_margin) -> Verdict:
    """Compare with a full reference. An aborted answer must be its beginning."""
    found, expected = answer.token_ids, reference.token_ids
    same = num_agreed(expected, found)
    pairs = zip(answer.logprobs[:same], reference.logprobs[:same], strict=True)
    error = max((abs(one - other) for one, other in pairs), default=0.0)
    if len(found) == same and (answer.aborted or len(expected) == same):
        return Verdict("right", 1.0, logprob_error=error)
    margin = reference.margins[same] if same < min(len(found), len(expected)) else None
    name = "tied" if margin is not None and margin < tie_margin else "wrong"
    return Verdict(name, same / max(1, len(found)), same, margin, error)
