"""`kvshare bench storage`: bytes of KV for near-duplicate prompts, over those of storing each in full."""

from functools import partial
from typing import Any

import numpy as np

from kvshare.requests import SharingMode
from kvshare_lab.bench.harness import ask, edited, random_prompt, running_engine
from kvshare_lab.bench.random_models import tiny_model

_VOCAB_SIZE = 290


async def run(
    *, prompts: int = 100, prompt_tokens: int = 2000, changed: float = 0.1, edits: int = 5, seed: int = 0
) -> dict[str, Any]:
    """Have an engine serve and store `prompts` variants of one prompt, and count the bytes of its tree."""
    draw = partial(random_prompt, np.random.default_rng(seed), vocab_size=_VOCAB_SIZE)
    model = tiny_model("llama", max_position_embeddings=prompt_tokens + 64)
    async with running_engine(model, {"index.dense": False}) as engine:
        prompt = base = draw(prompt_tokens)
        for _ in range(prompts):
            await ask(engine, prompt, mode=SharingMode.APPROX, store=True)
            prompt = edited(base, changed=changed, edits=edits, draw=draw)
        sharing = engine.sharing
        whole = prompts * prompt_tokens * sharing.cost.rates.bytes_per_token
        return {
            "nodes": sharing.tree.stats().num_nodes,
            "owned_bytes": sharing.tier.num_bytes,
            "whole_bytes": whole,
            "ratio": sharing.tier.num_bytes / whole,
        }
