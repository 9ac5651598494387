"""
`kvshare bench proxy`: what the HTTP front and sharing add to a request with nothing to share.

Prompts of one length are sent through HTTP on loopback and computed by the model directly, in turns.
Embedding is off, since it happens after the response. The difference of the medians is the added latency.
"""

import asyncio
import time
from typing import Any

import numpy as np

from delta_tree import Span, token_ids
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass
from kvshare_lab.bench.harness import Client, median, serving, timed

_WARM_UP = 5


async def run(*, repeats: int = 100, words: int = 60, seed: int = 0) -> dict[str, Any]:
    """Median added milliseconds over `repeats` chat requests that have nothing in common."""
    rng = np.random.default_rng(seed)
    through, straight = [], []
    async with serving({"index.dense": False}) as (client, engine):
        for _ in range(repeats + _WARM_UP):
            text = " ".join(f"{value:x}" for value in rng.integers(0, 2**32, words))
            num_tokens, http_s = await timed(_ask(client, engine.card.model_id, text))
            through.append(http_s)
            straight.append(await asyncio.to_thread(_straight, engine.server.shared_model, num_tokens, rng))
    through_ms, straight_ms = (1e3 * median(seconds[_WARM_UP:]) for seconds in (through, straight))
    return {
        "prompt_tokens": num_tokens,
        "added_ms": through_ms - straight_ms,
        "through_http_p50_ms": through_ms,
        "model_only_p50_ms": straight_ms,
    }


async def _ask(client: Client, model: str, text: str) -> int:
    """One chat request. Returns its number of prompt tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    async with client.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        return int((await response.json())["usage"]["prompt_tokens"])


def _straight(model: EmbeddedModel, num_tokens: int, rng: np.random.Generator) -> float:
    """Seconds of one prefill of random tokens, and nothing else."""
    tokens = token_ids(rng.integers(16, model.vocab_size, num_tokens))
    began = time.perf_counter()
    model.compute(PartialPass(model.new_sequence(num_tokens), (Span(0, num_tokens),)), tokens)
    return time.perf_counter() - began
