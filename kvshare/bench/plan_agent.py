"""
`kvshare bench plan --workload agent`: time to look up and plan very long prompts, and how long a short one
waits that arrives meanwhile.

Both go through `Sharing.find_plan`, as in serving: nomination on the event loop, planning on its threads.
Only the KV is missing. The store holds several runs of each task, stored in pieces as their plans say.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Mapping
from statistics import fmean
from typing import Any

import numpy as np

from delta_tree import DeltaTree, Node, TokenIds
from kvshare.bench.counted_store import NAMESPACE, CountedStore, nomination_s
from kvshare.bench.figures import grown, memory_bytes, per_prompt, percentiles
from kvshare.bench.text_like import AgentPrompts
from kvshare.collector import calm_collector
from kvshare.index_factory import nominator_settings
from kvshare.requests import Prompt, SharingMode
from kvshare.settings import load_settings
from kvshare.sharing.pipeline import Lookup, Sharing
from kvshare.sharing.plan import Plan
from vector_index import PromptText

_RUNS = 10  # stored of each task
_SHORT_TOKENS, _SHORT_STORED, _SHORT_EDITS = 500, 50, 4
_WARM_UP = 5
_NO_TEXT = PromptText("", "")


async def run(
    *, stored: int = 1000, prompt_tokens: int = 45_000, queries: int = 200, seed: int = 0
) -> dict[str, Any]:
    """Times of `queries` long prompts, and of short ones that arrive while a long one is planned."""
    rng = np.random.default_rng(seed)
    prompts = AgentPrompts(rng, prompt_tokens)
    store = CountedStore(DeltaTree.open(None, identity="bench"))
    async with store.sharing(nominator_settings(load_settings().index)) as sharing:
        calm_collector()  # as a server does
        before, began = memory_bytes(), time.perf_counter()
        long, short = await _fill(store, sharing, prompts, stored)
        build_s = time.perf_counter() - began
        memory = per_prompt(grown(before), stored)
        times = await _measure(rng, sharing, prompts, long, short, queries)
        fallbacks = sharing.telemetry.counts().fallbacks
        failures = {f"fallback:{part}:{reason}": count for (part, reason), count in fallbacks.items()}
    return {
        "workload": "agent",
        "edits": prompts.num_edits,
        **_figures(times),
        "failures": failures,
        "build_s": build_s,
        **memory,
    }


def _figures(times: Mapping[str, list[float]]) -> dict[str, Any]:
    blocked = percentiles(times["blocked"])
    return {
        **percentiles(times["total"]),
        **{stage: percentiles(times[stage]) for stage in ("nomination", "planning", "cpu")},
        "blocked_p50_ms": blocked["p50_ms"],
        "blocked_p99_ms": blocked["p99_ms"],
        "short_prompt_tokens": _SHORT_TOKENS,
        "short": percentiles(times["short"]),
        "candidates": fmean(times["candidates"]),
        "copied_fraction": fmean(times["copied"]),
    }


async def _fill(
    store: CountedStore, sharing: Sharing, prompts: AgentPrompts, num_stored: int
) -> tuple[list[TokenIds], list[TokenIds]]:
    """Store and index tasks, their later runs, and short prompts. Returns the tasks and the short prompts."""
    long: list[TokenIds] = []
    first: Node | None = None
    for number in range(num_stored):
        if first is None or number % _RUNS == 0:
            long.append(prompts.task())
            node = first = store.store(long[-1])
        else:
            long.append(prompts.run_again(first.token_ids))
            node = store.store(long[-1], store.plan(long[-1], first))
        await sharing.remember(node, None)
    short = [prompts.short(_SHORT_TOKENS) for _ in range(_SHORT_STORED)]
    for tokens in short:
        await sharing.remember(store.store(tokens), None)
    return long, short


async def _measure(
    rng: np.random.Generator,
    sharing: Sharing,
    prompts: AgentPrompts,
    long: list[TokenIds],
    short: list[TokenIds],
    num_queries: int,
) -> Mapping[str, list[float]]:
    """Seconds, counts and shares by name, one entry for each query."""
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(num_queries + _WARM_UP):
        if number == _WARM_UP:
            times.clear()
        query = prompts.run_again(long[int(rng.integers(len(long)))])
        other = prompts.run_again(short[int(rng.integers(len(short)))], num_edits=_SHORT_EDITS)
        cpu, began = time.process_time(), time.perf_counter()
        lookup = await _prepare(sharing, query)
        times["total"].append(time.perf_counter() - began)
        times["cpu"].append(time.process_time() - cpu)
        for name, value in _stages(lookup, len(query)).items():
            times[name].append(value)
        began = time.perf_counter()
        await _prepare(sharing, other)
        times["short"].append(time.perf_counter() - began)
        again = prompts.run_again(long[int(rng.integers(len(long)))])
        delay_s = float(rng.random()) * float(np.median(times["total"]))
        times["blocked"].append(await _blocked(_prepare(sharing, again), _prepare(sharing, other), delay_s))
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


def _prepare(sharing: Sharing, tokens: TokenIds) -> Awaitable[Lookup]:
    return sharing.find_plan(NAMESPACE, Prompt(tokens, _NO_TEXT), SharingMode.APPROX, by_embedding=False)


def _stages(lookup: Lookup, num_tokens: int) -> dict[str, float]:
    plan = lookup.plan
    copied = plan.exact_length + plan.num_copied if isinstance(plan, Plan) else 0
    return {
        "planning": lookup.stage_seconds.get("plan", 0.0),
        "nomination": nomination_s(lookup),
        "candidates": len(lookup.candidates),
        "copied": copied / num_tokens,
    }
