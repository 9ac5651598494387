"""
`kvshare bench burst`: near-duplicates that arrive at once, with nothing stored.

    burst   all at once: one is computed, the others wait for it and copy
    warm    the first is answered and stored, then the others arrive at once
    full    all at once, without sharing

Each burst is of new prompts. Its time runs to the last first token; that of `warm` is the donor's and the
others' together, so that all arms serve as many prompts. The embedded model is a random-weight Llama of about
100 M parameters.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from delta_tree import TokenIds
from kvshare.requests import SharingMode
from kvshare_lab.bench.figures import intervals
from kvshare_lab.bench.harness import (
    alternate,
    ask,
    edited,
    environment,
    median,
    random_prompt,
    running_engine,
)
from kvshare_lab.bench.random_models import timing_model

_VOCAB_SIZE = 1000
_ARMS = ("burst", "warm", "full")


class Served(NamedTuple):
    """One request: seconds to its first token, and the share of its prompt that was not computed."""

    first_token_s: float
    reused: float


async def run(
    *,
    concurrency: int = 8,
    prompt_tokens: int = 2000,
    changed: float = 0.1,
    edits: int = 5,
    repeats: int = 7,
    seed: int = 0,
) -> dict[str, Any]:
    """Figures over `repeats` bursts of `concurrency` edits of one prompt; see `compare`."""
    draw = partial(random_prompt, np.random.default_rng(seed), vocab_size=_VOCAB_SIZE)

    def prompts() -> list[TokenIds]:
        base = draw(prompt_tokens)
        return [edited(base, changed=changed, edits=edits, draw=draw) for _ in range(concurrency)]

    model = timing_model(prompt_tokens=prompt_tokens, seed=seed)
    async with running_engine(model, {"index.dense": False}) as engine:

        async def serve(arm: str, prompt: TokenIds) -> Served:
            mode = SharingMode.OFF if arm == "full" else SharingMode.APPROX
            answer = await ask(engine, prompt, mode=mode, store=arm != "full")
            return Served(answer.first_token_s, answer.report.num_cached / answer.report.num_prompt_tokens)

        figures = await compare(prompts, serve, engine.settle, repeats=repeats)
    return {"engine": "embedded", **figures, "environment": environment()}


async def compare(
    prompts: Callable[[], list[TokenIds]],
    serve: Callable[[str, TokenIds], Awaitable[Served]],
    settle: Callable[[], Awaitable[object]],
    *,
    repeats: int,
) -> dict[str, Any]:
    """
    Serve bursts by each arm. `settle` waits until what was served is stored.

    `of_warm`, `of_full`: median seconds of that arm over those of `burst`, with the intervals of the repeats'
    own ratios. `reused`: medians by arm.
    """

    async def measure(arm: str) -> Served:
        """Of a whole burst: seconds, and the mean share that was reused."""
        waiting, first = prompts(), []
        if arm == "warm":
            first.append(await serve(arm, waiting.pop(0)))
            await settle()
        others = await asyncio.gather(*(serve(arm, prompt) for prompt in waiting))
        await settle()
        seconds = sum(each.first_token_s for each in first) + max(each.first_token_s for each in others)
        return Served(seconds, float(np.mean([each.reused for each in (*first, *others)])))

    found = await alternate(_ARMS, repeats, measure)
    seconds = {arm: [each.first_token_s for each in bursts] for arm, bursts in found.items()}
    medians = {arm: median(each) for arm, each in seconds.items()}
    each = {
        f"of_{arm}": [other / burst for other, burst in zip(seconds[arm], seconds["burst"], strict=True)]
        for arm in ("warm", "full")
    }
    return {
        "of_warm": medians["warm"] / medians["burst"],
        "of_warm_each": each["of_warm"],
        "of_full": medians["full"] / medians["burst"],
        "intervals": intervals(each),
        "seconds": medians,
        "reused": {arm: median([each.reused for each in bursts]) for arm, bursts in found.items()},
    }
