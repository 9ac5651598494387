"""
`kvshare bench storage`: KV bytes owned by near-duplicate prompts, over what storing each whole would
cost.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from kvshare.bench.harness import ask, edited, random_prompt, running_engine
from kvshare.bench.random_models import tiny_model
from kvshare.requests import SharingMode

_VOCAB_SIZE = 290


def run(
    *, prompts: int = 100, prompt_tokens: int = 2000, changed: float = 0.1, edits: int = 5, seed: int = 0
) -> dict[str, Any]:
    """Sends `prompts` variants of one prompt through an engine and counts what the tree then owns."""
    return asyncio.run(_run(prompts, prompt_tokens, changed, edits, seed))


async def _run(num_prompts: int, num_tokens: int, changed: float, edits: int, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    model = tiny_model("llama", max_position_embeddings=num_tokens + 64)
    async with running_engine(model, {"index.dense": False}) as engine:
        base = random_prompt(rng, num_tokens, _VOCAB_SIZE)
        stored_tokens = 0
        for number in range(num_prompts):
            prompt = base
            if number:
                prompt = edited(
                    base,
                    changed=changed,
                    edits=edits,
                    draw=lambda length: random_prompt(rng, length, _VOCAB_SIZE),
                )
            await ask(engine, prompt, mode=SharingMode.APPROX, store=True)
            stored_tokens += num_tokens
        sharing = engine.sharing
        whole = stored_tokens * sharing.cost.rates.bytes_per_token
        return {
            "benchmark": "storage",
            "prompts": num_prompts,
            "prompt_tokens": num_tokens,
            "changed": changed,
            "edits": edits,
            "seed": seed,
            "nodes": sharing.tree.stats().num_nodes,
            "owned_bytes": sharing.tier.num_bytes,
            "whole_bytes": whole,
            "ratio": sharing.tier.num_bytes / whole,
        }
