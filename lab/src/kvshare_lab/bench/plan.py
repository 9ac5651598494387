"""
`kvshare bench plan`: time to find donors for a prompt, align and plan, among many stored ones; no model.

    forms    the store holds variants of 200 templates: good donors among many unrelated prompts
    agent    very long transcripts; the store holds several runs of each task, in pieces as their plans say.
             Also how long a short prompt waits that arrives while a long one is planned

All go through `Sharing.find_plan`, as in serving: nomination on the event loop, planning on its threads. Only
the KV is missing. Embeddings of stored forms are those of their templates with some noise, as embedding all
of them would take minutes. The query's text is really embedded, in the arm `with_dense`, which is
left out where no embedder is installed.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from delta_tree import TokenIds, token_ids
from kvshare.collector import keep_freed_memory, make_collections_rare, take_short_turns
from kvshare.extras import missing_modules
from kvshare.requests import Prompt, SharingMode
from kvshare.served_index import nominator_settings
from kvshare.settings import load_settings
from kvshare.sharing.lookup import Lookup
from kvshare.sharing.pipeline import Sharing
from kvshare.sharing.plan import Plan
from kvshare_lab.bench.counted_store import NAMESPACE, CountedStore, Variants, nomination_s
from kvshare_lab.bench.figures import grown, memory_bytes, per_prompt, percentiles
from kvshare_lab.bench.harness import timed
from kvshare_lab.bench.text_like import AgentPrompts
from vector_index import Embedder, PromptRecord, PromptText

_TEMPLATES = 200
_WORDS = ("report", "value", "patient", "street", "order", "late", "invoice", "exam", "red", "sum", "cat")

_RUNS = 10  # stored of each task
_SHORT_TOKENS, _SHORT_STORED, _SHORT_EDITS = 500, 50, 4
_WARM_UP = 5
_Indexed = tuple[list[TokenIds], list[TokenIds]]  # long prompts, short prompts
_SIZES = {"forms": (10_000, 2000), "agent": (1000, 45_000)}  # stored prompts, tokens of each


async def run(
    *,
    workload: Literal["agent"] | None = None,
    stored: int | None = None,
    prompt_tokens: int | None = None,
    queries: int = 200,
    seed: int = 0,
) -> dict[str, Any]:
    """
    Times of `queries` new prompts among `stored` ones, and the memory for each stored prompt.

    `stored`, `prompt_tokens`: by default 10,000 forms of 2,000 tokens, or 1,000 transcripts of 45,000.
    """
    name, measure = ("agent", _agent) if workload == "agent" else ("forms", _forms)
    own_stored, own_tokens = _SIZES[name]
    sizes = {"stored": stored or own_stored, "prompt_tokens": prompt_tokens or own_tokens}
    found = await measure(np.random.default_rng(seed), CountedStore(), queries=queries, **sizes)
    return {"workload": name, **sizes, **found}


async def _forms(
    rng: np.random.Generator, store: CountedStore, *, stored: int, prompt_tokens: int, queries: int
) -> dict[str, Any]:
    texts = [" ".join(rng.choice(_WORDS, 120).tolist()) for _ in range(min(_TEMPLATES, stored))]
    embedder = None if missing_modules("embeddings") else _Embedder(texts)
    settings = nominator_settings(load_settings().index)
    nomination = replace(settings, dense_min_uncovered=0.0, search_timeout_s=5.0, embed_timeout_s=5.0)
    store.limits = replace(store.limits, dense_max_share=None)
    async with store.sharing(nomination, embedder) as sharing:
        _as_a_server()
        before = memory_bytes()
        variants = Variants(rng, store, num_templates=len(texts), num_tokens=prompt_tokens)
        with nullcontext() if embedder is None else embedder.replaying():
            await sharing.nominator.remember_all(_stored_forms(store, variants, texts, stored))
        memory = per_prompt(grown(before), stored)
        arms: dict[str, Any] = {"without_dense": None, "with_dense": None}
        for name, dense in (("without_dense", False), ("with_dense", True)):
            if embedder is not None or not dense:
                arms[name] = await _measure_forms(sharing, variants, texts, queries, dense=dense)
    return {**arms, **{name: arms["without_dense"][name] for name in ("p50_ms", "p99_ms")}, **memory}


def _stored_forms(
    store: CountedStore, variants: Variants, texts: Sequence[str], num_stored: int
) -> Iterator[PromptRecord]:
    """The templates, then variants of them; each variant is stored when it is asked for."""
    for text, node in zip(texts, variants.templates, strict=True):
        yield PromptRecord(node.node_id, NAMESPACE, node.token_ids, PromptText(text, ""))
    for _ in range(num_stored - len(texts)):
        variant = variants.draw()
        node = store.store(variant.tokens, variant.plan)
        yield PromptRecord(node.node_id, NAMESPACE, node.token_ids, PromptText(texts[variant.number], ""))


async def _measure_forms(
    sharing: Sharing, variants: Variants, texts: Sequence[str], num_queries: int, *, dense: bool
) -> dict[str, Any]:
    total, nomination, planning, saved = [], [], [], []  # seconds thrice, shares of the prompt
    for _ in range(num_queries):
        variant = variants.draw()
        text = texts[variant.number]
        lookup, seconds = await timed(_find_plan(sharing, variant.tokens, text, by_embedding=dense))
        total.append(seconds)
        nomination.append(nomination_s(lookup))
        planning.append(lookup.stage_seconds.get("plan", 0.0))
        saved.append(1 - lookup.plan.charged_budget if isinstance(lookup.plan, Plan) else 0.0)
    stages = {"nomination": percentiles(nomination), "planning": percentiles(planning)}
    return {**percentiles(total), **stages, "saved_fraction": fmean(saved)}


class _Embedder(Embedder):
    """While `replay` is on, the templates' texts get their own embeddings with some noise."""

    replay = False

    def __init__(self, texts: Sequence[str]) -> None:
        super().__init__()
        self._known = dict(zip(texts, self.embed(texts), strict=True))
        self._rng = np.random.default_rng(1)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        self.replay = True
        try:
            yield
        finally:
            self.replay = False

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        if not self.replay:
            return super().embed(texts)
        known = np.stack([self._known[text] for text in texts])
        noisy = known + self._rng.normal(0.0, 0.005, known.shape).astype(np.float32)
        return np.asarray(noisy / np.linalg.norm(noisy, axis=1, keepdims=True), dtype=np.float32)


async def _agent(
    rng: np.random.Generator, store: CountedStore, *, stored: int, prompt_tokens: int, queries: int
) -> dict[str, Any]:
    prompts = AgentPrompts(rng, prompt_tokens)
    async with store.sharing(nominator_settings(load_settings().index)) as sharing:
        _as_a_server()
        before = memory_bytes()
        indexed, build_s = await timed(_fill(store, sharing, prompts, stored))
        memory = per_prompt(grown(before), stored)
        times = await _measure_agent(rng, sharing, prompts, indexed, queries)
        fallbacks = sharing.telemetry.counts().fallbacks
    blocked = percentiles(times["blocked"])
    return {
        "edits": prompts.num_edits,
        **percentiles(times["total"]),
        **{stage: percentiles(times[stage]) for stage in ("nomination", "planning", "cpu")},
        "blocked_p50_ms": blocked["p50_ms"],
        "blocked_p99_ms": blocked["p99_ms"],
        "short_prompt_tokens": _SHORT_TOKENS,
        "short": percentiles(times["short"]),
        "candidates": fmean(times["candidates"]),
        "copied_fraction": fmean(times["copied"]),
        "failures": {f"fallback:{part}:{reason}": count for (part, reason), count in fallbacks.items()},
        "build_s": build_s,
        **memory,
    }


def _as_a_server() -> None:
    make_collections_rare()
    take_short_turns()
    keep_freed_memory()


async def _fill(store: CountedStore, sharing: Sharing, prompts: AgentPrompts, num_stored: int) -> _Indexed:
    long = []
    for number in range(num_stored):
        if number % _RUNS == 0:
            node = first = store.store(prompts.task())
        else:
            again = prompts.run_again(first.token_ids)
            node = store.store(again, store.plan(again, first))
        long.append(node.token_ids)
        await sharing.indexing.remember(node, None)
    short = [token_ids(prompts.words(_SHORT_TOKENS)) for _ in range(_SHORT_STORED)]
    for tokens in short:
        await sharing.indexing.remember(store.store(tokens), None)
    return long, short


async def _measure_agent(
    rng: np.random.Generator, sharing: Sharing, prompts: AgentPrompts, indexed: _Indexed, num_queries: int
) -> Mapping[str, list[float]]:
    """Seconds, counts and shares by name, one entry for each query."""
    long, short = indexed
    times: dict[str, list[float]] = defaultdict(list)
    find_plan = partial(_find_plan, sharing)
    for number in range(num_queries + _WARM_UP):
        if number == _WARM_UP:
            times.clear()
        query = prompts.run_again(long[int(rng.integers(len(long)))])
        other = prompts.run_again(short[int(rng.integers(len(short)))], num_edits=_SHORT_EDITS)
        cpu = time.process_time()
        lookup, total_s = await timed(find_plan(query))
        times["total"].append(total_s)
        times["cpu"].append(time.process_time() - cpu)
        times["planning"].append(lookup.stage_seconds.get("plan", 0.0))
        times["nomination"].append(nomination_s(lookup))
        times["candidates"].append(len(lookup.candidates))
        times["copied"].append(lookup.report(len(query)).num_cached / len(query))
        _, short_s = await timed(find_plan(other))
        times["short"].append(short_s)
        again = prompts.run_again(long[int(rng.integers(len(long)))])
        delay_s = float(rng.random()) * float(np.median(times["total"]))
        times["blocked"].append(await _blocked(find_plan(again), find_plan(other), delay_s))
    return times


async def _blocked(long: Awaitable[Lookup], short: Awaitable[Lookup], delay_s: float) -> float:
    """Seconds until the short one is planned, from when it is due: a blocked event loop counts, too."""
    due = time.perf_counter() + delay_s
    planning = asyncio.ensure_future(long)
    await asyncio.sleep(delay_s)
    await short
    waited = time.perf_counter() - due
    await planning
    return waited


def _find_plan(
    sharing: Sharing, tokens: TokenIds, text: str = "", *, by_embedding: bool = False
) -> Awaitable[Lookup]:
    prompt = Prompt(tokens, PromptText(text, ""))
    return sharing.find_plan(NAMESPACE, prompt, SharingMode.APPROX, by_embedding=by_embedding)
