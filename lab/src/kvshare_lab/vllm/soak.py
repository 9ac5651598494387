"""
`kvshare bench soak --engine vllm`: minutes of mixed traffic, in which every exact answer must be vLLM's own.

Float32 on a small model, a KV cache so small that requests are preempted, clients that hang up, prompts that
are evicted while others plan with them, loads that fail. The reference of each prompt is stock vLLM's greedy
answer. Answers that may be approximate (mode approx, and not an unrelated prompt) are only counted, with how
far they agree; where the load failed, vLLM has computed everything, so that they must be its own, too.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from statistics import fmean
from typing import Any

from delta_tree import TokenIds
from kvshare.errors import EngineError
from kvshare_lab.fidelity.measures import num_agreed
from kvshare_lab.vllm.client import Answer, Client
from kvshare_lab.vllm.illustrated import ROOM, illustrated
from kvshare_lab.vllm.kinds import ILLUSTRATED
from kvshare_lab.vllm.prompts import Mixture, Op
from kvshare_lab.vllm.servers import failing_loads
from kvshare_lab.vllm.session import Session, run_benchmark, watching
from kvshare_lab.vllm.stack import ALWAYS_SHARE, BenchConfig, StackOptions

_MAX_EXAMPLES = 10
_BLOCK_SIZE = 32
_EVICT_ALL = 0.1  # share of the evictions
_FAILED = "load_failed"  # the connector's reason
_MUST_FAIL_MINUTES = 1.0  # so long without a failed load is an error
_MAX_POLLS, _POLL_S = 100, 0.02


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
    of_noise: float | None = None  # see `are_right`
    keeps_blocks: bool = False  # another connector, next to KVShare's

    @property
    def own_model(self) -> str:
        return "small"

    @property
    def max_model_len(self) -> int:
        return 2 * self.max_prompt + self.output_tokens + (ROOM if self.model == ILLUSTRATED else 0)

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
            one_group=True,
        )
        own = self.stack_of(vllm, kv_bytes=32 * 2**20)
        return replace(own, proxy_settings=ALWAYS_SHARE, can_fail=True, keeps_blocks=self.keeps_blocks)


async def measure(bench: Session[Config]) -> dict[str, Any]:
    """Counts of right, wrong, tied and approximate answers. `passed`: none wrong, none failed."""
    before, soak, servers = await bench.proxy.counters(), _Soak(bench), bench.servers
    async with watching(bench.control) as watch:
        with failing_loads(servers.shared):
            await soak.run()
    failed_loads = watch.decisions.get(f"reason:{_FAILED}", 0)
    if not failed_loads and bench.config.minutes >= _MUST_FAIL_MINUTES:
        soak.errors["no load has failed"] += 1
    counted = (await bench.proxy.counters()).since(before)
    lookups = counted.by("kvshare_lookup_requests_total", "result", "reason")
    preemptions = {
        server.name: (await client.counters()).total("vllm:num_preemptions_total")
        for server, client in ((servers.plain, bench.plain), (servers.shared, bench.shared))
    }
    return {
        **soak.summary(),
        "failed_loads": failed_loads,
        "evicted_segments": watch.num_dropped,
        "preemptions": preemptions,
        "within_bytes": watch.peak_bytes <= watch.max_bytes,
        "decisions": watch.decisions,
        "lookups": {planned: int(count) for planned, count in lookups.items() if count},
        "tokens_by_source": counted.by("kvshare_prompt_tokens_by_source_total", "source"),
    }


@dataclass(slots=True)
class _Soak:
    """Clients that send requests until the time is over, and the verdicts on their answers."""

    bench: Session[Config]
    mixture: Mixture = field(init=False)
    references: dict[bytes, asyncio.Task[Answer]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)
    judged: list[tuple[Op, bool, Verdict]] = field(default_factory=list)  # with whether it must be vLLM's own
    errors: Counter[str] = field(default_factory=Counter)
    num_evictions: int = 0

    def __post_init__(self) -> None:
        config = self.bench.config
        self.mixture = Mixture(self.bench.rng, config.min_prompt, config.max_prompt, config.max_prompts)

    async def run(self) -> None:
        deadline = time.monotonic() + 60 * self.bench.config.minutes

        async def one_client() -> None:
            while time.monotonic() < deadline:
                await self._one(self.mixture.draw())

        await asyncio.gather(*(one_client() for _ in range(self.bench.config.concurrency)))

    async def _one(self, op: Op) -> None:
        self.sent[f"{op.kind}:{op.mode}" + (":abort" if op.aborts else "")] += 1
        config = self.bench.config
        try:
            if (answer := await self._asked(op)) is not None:
                verdict = judge(answer, await self._reference(op), tie_margin=config.tie_margin)
                is_own = not self._may_be_approximate(op) or await self._is_recomputed(answer)
                self.judged.append((op, is_own, verdict))
        except EngineError as exc:
            self.errors[str(exc)[:200]] += 1
        self.mixture.remember(op.prompt)
        if self.sent.total() % config.evict_every == 0:
            self.num_evictions += 1
            await self._evict()

    def _ask(self, client: Client, prompt: TokenIds, **options: Any) -> Coroutine[Any, Any, Answer]:
        """In tokens; or as a chat with images, if that is the model."""
        if self.bench.config.model == ILLUSTRATED:
            return client.chat(illustrated(prompt), **options)
        return client.complete(prompt, **options)

    def _may_be_approximate(self, op: Op) -> bool:
        """Unrelated prompts may have an image in common."""
        has_images = self.bench.config.model == ILLUSTRATED
        return op.may_be_approximate or (has_images and op.mode == "approx")

    async def _asked(self, op: Op) -> Answer | None:
        """None where the client hung up before the first token."""
        asking = self._ask(
            self.bench.proxy,
            op.prompt,
            max_tokens=self.bench.config.output_tokens,
            num_top=2,
            extra={"kvshare": {"mode": op.mode}},
            abort_after=op.abort_after,
        )
        try:
            return await asyncio.wait_for(asking, op.abort_s)
        except TimeoutError:
            return None

    async def _is_recomputed(self, answer: Answer) -> bool:
        """Whether vLLM computed all of a planned request, because its load failed."""
        if answer.headers.get("X-KVShare-Decision") not in ("approx", "exact"):
            return False
        path = f"/admin/requests/{answer.headers['X-KVShare-Request']}"
        for _ in range(_MAX_POLLS):  # what was executed may be reported after the answer
            if executed := json.loads(await self.bench.proxy.fetch(path))["executed"]:
                # "write": an earlier load succeeded, before vLLM preempted the request.
                return executed["reason"] == _FAILED and "write" not in executed["seconds"]
            await asyncio.sleep(_POLL_S)
        return False

    async def _reference(self, op: Op) -> Answer:
        """Stock vLLM's answer; each prompt is sent to it once."""
        key = op.prompt.tobytes()
        if key not in self.references:
            max_tokens = self.bench.config.output_tokens
            asking = self._ask(self.bench.plain, op.prompt, max_tokens=max_tokens, num_top=2)
            self.references[key] = asyncio.create_task(asking)
        return await self.references[key]

    async def _evict(self) -> None:
        """Everything, or a prompt of the tree's first levels; it may have been evicted meanwhile."""
        proxy, rng = self.bench.proxy, self.bench.rng
        if rng.random() < _EVICT_ALL:
            await proxy.fetch("/admin/evict", {"all": True, "dry_run": False})
        elif node_ids := _node_ids(json.loads(await proxy.fetch("/admin/tree?depth=3"))["roots"]):
            chosen = node_ids[int(rng.integers(len(node_ids)))]
            try:
                await proxy.fetch("/admin/evict", {"node": chosen})
            except EngineError as exc:
                if "node_not_found" not in str(exc):
                    raise

    def summary(self) -> dict[str, Any]:
        exact = [(op, verdict) for op, is_own, verdict in self.judged if is_own]
        names = Counter(verdict.name for _, verdict in exact)
        agreements = [verdict.agreement for _, is_own, verdict in self.judged if not is_own]
        examples = [
            {"kind": op.kind, "mode": op.mode, "prompt_tokens": len(op.prompt), **asdict(verdict)}
            for op, verdict in exact
            if verdict.name != "right"
        ]
        return {
            "passed": not self.errors and are_right(exact, of_noise=self.bench.config.of_noise),
            "requests": self.sent.total(),
            "wrong_outputs": names["wrong"],
            "ties": names["tied"],
            "error": largest_error(exact, shares_nothing=False),
            "noise": largest_error(exact, shares_nothing=True),
            "right_outputs": names["right"],
            "recomputed_outputs": sum(
                is_own and self._may_be_approximate(op) for op, is_own, _ in self.judged
            ),
            "approximate_outputs": len(agreements),
            "approximate_agreement": fmean(agreements) if agreements else None,
            "aborted": sum(count for op, count in self.sent.items() if op.endswith(":abort")),
            "failed": dict(self.errors),
            "evictions": self.num_evictions,
            "ops": dict(sorted(self.sent.items())),
            "examples": examples[:_MAX_EXAMPLES],
        }


def _node_ids(branches: list[Mapping[str, Any]]) -> list[int]:
    return [node_id for branch in branches for node_id in (int(branch["id"]), *_node_ids(branch["children"]))]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`name`: right, tied or wrong. `agreement`: share of the answer's tokens before the first difference."""

    name: str
    agreement: float
    first_difference: int | None = None
    margin: float | None = None  # of the reference, at the first difference
    logprob_error: float = 0.0  # largest, over the tokens before

    @property
    def error(self) -> float:
        """Of a log-probability: what must differ for this answer to come about."""
        return max(self.logprob_error, self.margin or 0.0)


def are_right(exact: Sequence[tuple[Op, Verdict]], *, of_noise: float | None) -> bool:
    """
    Whether none of the answers that must be stock vLLM's is wrong. With `of_noise`: or all are as long as
    expected, and those of requests that may share are at most so many times as far off as the others.
    """
    wrong = [verdict for _, verdict in exact if verdict.name == "wrong"]
    if not wrong or of_noise is None or any(verdict.margin is None for verdict in wrong):
        return not wrong
    return largest_error(exact, shares_nothing=False) <= of_noise * largest_error(exact, shares_nothing=True)


def largest_error(judged: Iterable[tuple[Op, Verdict]], *, shares_nothing: bool) -> float:
    """Of the answers of requests that share nothing, or of those that may share."""
    return max((each.error for op, each in judged if op.shares_nothing is shares_nothing), default=0.0)


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


run = partial(run_benchmark, "soak", measure)
