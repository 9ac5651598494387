"""
`kvshare bench proxy`: what the HTTP front and sharing add to a request with nothing to share.

The same new prompt length, alternating: through HTTP on loopback, and straight into the model. Embedding is
off, as it happens after the response; the difference of the medians is the added latency.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from typing import Any

import numpy as np

from delta_tree import Span
from kvshare.bench.front import Client, serving
from kvshare.bench.harness import bench_settings, median, new_engine
from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass

_WARM_UP = 5


async def run(*, repeats: int = 100, words: int = 60, seed: int = 0) -> dict[str, Any]:
    """Median added milliseconds over `repeats` chat requests that have nothing in common."""
    rng = np.random.default_rng(seed)
    through: list[float] = []
    straight: list[float] = []
    num_tokens = 0
    with tempfile.TemporaryDirectory() as folder:
        settings = bench_settings(folder, {"index.dense": False})
        engine = new_engine(None, settings)
        async with serving(settings, engine) as client:
            for repeat in range(repeats + _WARM_UP):
                text = " ".join(f"{value:x}" for value in rng.integers(0, 2**32, words))
                http_s, num_tokens = await _through_http(client, engine.card.model_id, text)
                straight_s = await asyncio.to_thread(_straight, engine.server.shared_model, num_tokens, rng)
                if repeat >= _WARM_UP:
                    through.append(http_s)
                    straight.append(straight_s)
    added = 1e3 * (median(through) - median(straight))
    return {
        "prompt_tokens": num_tokens,
        "added_ms": added,
        "through_http_p50_ms": 1e3 * median(through),
        "model_only_p50_ms": 1e3 * median(straight),
    }


async def _through_http(client: Client, model: str, text: str) -> tuple[float, int]:
    """Seconds of one chat request, and its prompt tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    began = time.perf_counter()
    async with client.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        usage = (await response.json())["usage"]
    return time.perf_counter() - began, usage["prompt_tokens"]


def _straight(model: EmbeddedModel, num_tokens: int, rng: np.random.Generator) -> float:
    """One prefill of as many tokens, and nothing else."""
    tokens = rng.integers(16, model.vocab_size, num_tokens).astype(np.int32)
    began = time.perf_counter()
    model.compute(PartialPass(model.new_sequence(num_tokens), (Span(0, num_tokens),)), tokens)
    return time.perf_counter() - began
