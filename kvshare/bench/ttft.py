"""
`kvshare bench ttft`: time to first token of a prompt of which a stored one differs in a few places.

Arms, alternating in one process on a random-weight Llama of about 100 M parameters:
    full           nothing is shared
    shared         KVShare: nomination, planning, laying out, rotation and partial attention included
    exact_prefix   only the tokens before the first difference, what a prefix cache gets
    ideal          a prompt of which all but as many last tokens as `shared` computed is an exact prefix
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from kvshare.bench.harness import Answer, ask, edited, environment, median, random_prompt, running_engine
from kvshare.bench.random_models import timing_model
from kvshare.engines.base import SharingMode

_VOCAB_SIZE = 1000  # of the tokens drawn; the model's own is larger


def run(
    *,
    prompt_tokens: int = 2000,
    changed: float = 0.1,
    edits: int = 5,
    repeats: int = 5,
    seed: int = 0,
) -> dict[str, Any]:
    """Medians over `repeats` recipients, each new to the store."""
    return asyncio.run(_run(prompt_tokens, changed, edits, repeats, seed))


async def _run(num_tokens: int, changed: float, edits: int, repeats: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    model = timing_model(max_position_embeddings=num_tokens + 64, vocab_size=16384, seed=seed)
    arms: dict[str, list[Answer]] = {"full": [], "shared": [], "exact_prefix": [], "ideal": []}
    async with running_engine(model) as engine:
        donor = random_prompt(rng, num_tokens, _VOCAB_SIZE)
        await ask(engine, donor, mode=SharingMode.OFF, store=True)
        for repeat in range(repeats + 1):
            recipient = edited(rng, donor, changed=changed, edits=edits, vocab_size=_VOCAB_SIZE)
            full = await ask(engine, recipient, mode=SharingMode.OFF)
            shared = await ask(engine, recipient, mode=SharingMode.APPROX)
            prefix = await ask(engine, recipient, mode=SharingMode.EXACT)
            computed = shared.report.num_recomputed + shared.report.num_repaired if shared.report else 1
            same_head = np.array(donor)
            same_head[num_tokens - computed :] = random_prompt(rng, computed, _VOCAB_SIZE)
            ideal = await ask(engine, same_head.astype(np.int32), mode=SharingMode.EXACT)
            if repeat == 0:
                continue  # caches and allocator are warm from here on
            for name, answer in zip(arms, (full, shared, prefix, ideal), strict=True):
                arms[name].append(answer)
    return _summary(arms, num_tokens=num_tokens, changed=changed, edits=edits, seed=seed)


def _summary(
    arms: dict[str, list[Answer]], *, num_tokens: int, changed: float, edits: int, seed: int
) -> dict[str, Any]:
    ttft = {name: median([answer.first_token_s for answer in answers]) for name, answers in arms.items()}
    report = arms["shared"][-1].report
    finished = arms["shared"][-1].finished
    assert report is not None
    assert finished is not None
    computed = report.num_recomputed + report.num_repaired
    return {
        "benchmark": "ttft",
        "engine": "embedded",
        "prompt_tokens": num_tokens,
        "changed": changed,
        "edits": edits,
        "seed": seed,
        "repeats": len(arms["full"]),
        "speedup": ttft["full"] / ttft["shared"],
        "ideal_speedup": ttft["full"] / ttft["ideal"],
        "of_ideal": ttft["ideal"] / ttft["shared"],
        "exact_prefix_speedup": ttft["full"] / ttft["exact_prefix"],
        "recomputed_fraction": computed / num_tokens,
        "tokens": {
            "exact": report.num_exact,
            "copied": report.num_copied,
            "recomputed": report.num_recomputed,
            "repaired": report.num_repaired,
        },
        "decision": report.decision,
        "median_ttft_s": ttft,
        "shared_stage_ms": {stage: 1e3 * value for stage, value in finished.stage_seconds.items()},
        "environment": environment(),
    }
