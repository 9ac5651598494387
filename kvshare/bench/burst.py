"""
`kvshare bench burst`: near-duplicates that arrive at once, with nothing stored.

    burst   all at once: one is computed, the others wait for it and copy
    warm    the same prompts' kind, the first of them stored before the others come, all of these at once
    full    all at once, without sharing

Times are from the first submission to the last first token; of `warm` the donor's own counts, too: all arms
serve as many prompts. On a random-weight Llama of about 100 M parameters, arms in turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.harness import (
    Answer,
    ask,
    edited,
    environment,
    median,
    random_prompt,
    rounds,
    running_engine,
)
from kvshare.bench.random_models import timing_model
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.requests import SharingMode

_VOCAB_SIZE = 1000
ARMS = ("burst", "warm", "full")


async def run(
    *,
    concurrency: int = 8,
    prompt_tokens: int = 2000,
    changed: float = 0.1,
    edits: int = 5,
    repeats: int = 3,
    seed: int = 0,
) -> dict[str, Any]:
    """`of_warm`: the warm arm's median time over the burst's; `reused`: share of prompt tokens, by arm."""
    rng = np.random.default_rng(seed)

    def draw(length: int) -> TokenIds:
        return random_prompt(rng, length, _VOCAB_SIZE)

    model = timing_model("llama", max_position_embeddings=prompt_tokens + 64, vocab_size=16384, seed=seed)
    seconds: dict[str, list[float]] = {name: [] for name in ARMS}
    reused: dict[str, list[float]] = {name: [] for name in ARMS}
    async with running_engine(model, {"index.dense": False}) as engine:
        for counts, order in rounds(ARMS, repeats):
            for name in order:
                base = draw(prompt_tokens)
                prompts = [edited(base, changed=changed, edits=edits, draw=draw) for _ in range(concurrency)]
                answers = await _served(engine, name, prompts)
                if counts:
                    seconds[name].append(time_of(name, [answer.first_token_s for answer in answers]))
                    reused[name].append(_reused(answers))
    return {"engine": "embedded", **ratios(seconds, reused), "environment": environment()}


async def _served(engine: EmbeddedEngine, arm: str, prompts: Sequence[TokenIds]) -> list[Answer]:
    mode, store = (SharingMode.OFF, False) if arm == "full" else (SharingMode.APPROX, True)
    first = [await ask(engine, prompts[0], mode=mode, store=store)] if arm == "warm" else []
    others = prompts[len(first) :]
    return first + await asyncio.gather(*(ask(engine, each, mode=mode, store=store) for each in others))


def time_of(arm: str, ttft_s: Sequence[float]) -> float:
    """Of all of them; what is sent one after the other adds up."""
    if arm == "warm":
        donor, *others = ttft_s
        return donor + max(others)
    return max(ttft_s)


def ratios(seconds: Mapping[str, Sequence[float]], reused: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Of the repeats of each arm: how much faster all at once are, and the medians."""
    times = {name: median(found) for name, found in seconds.items()}
    pairs = zip(seconds["warm"], seconds["burst"], strict=True)
    return {
        "of_warm": times["warm"] / times["burst"],
        "of_warm_each": [warm / burst for warm, burst in pairs],
        "of_full": times["full"] / times["burst"],
        "seconds": times,
        "reused": {name: median(found) for name, found in reused.items()},
    }


def _reused(answers: Sequence[Answer]) -> float:
    reports = [answer.report for answer in answers]
    return sum(report.num_cached for report in reports) / sum(report.num_prompt_tokens for report in reports)
