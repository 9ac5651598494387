"""
`kvshare bench proxy`: what the HTTP front and sharing add to a request with nothing to share.

Prompts of one length are sent through HTTP on loopback, each unlike the others. What a request takes besides
its own forward pass is what was added: HTTP, the chat template, tokens, lookup, sampling and the answer. The
pass is timed in the request itself: one of another thread has threads of torch's own, and differs by
milliseconds.
Embedding is off, and each prompt is stored before the next is sent: both happen after the response.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from delta_tree import TokenIds
from kvshare.embedded.model import EmbeddedModel
from kvshare.kv.attention import PartialPass
from kvshare_lab.bench.harness import Client, median, serving, timed

_WARM_UP = 5


async def run(*, repeats: int = 100, words: int = 60, seed: int = 0) -> dict[str, Any]:
    """Median added milliseconds over `repeats` chat requests that have nothing in common."""
    rng = np.random.default_rng(seed)
    through, inside = [], []
    async with serving({"index.dense": False}) as (client, engine):
        with _timed_passes(engine.server.shared_model) as passes:
            for _ in range(repeats + _WARM_UP):
                text = " ".join(f"{value:x}" for value in rng.integers(0, 2**32, words))
                passes.clear()
                num_tokens, http_s = await timed(_ask(client, engine.card.model_id, text))
                through.append(http_s)
                inside.append(sum(passes))
                await engine.settle()
    requests = list(zip(through, inside, strict=True))[_WARM_UP:]
    return {
        "prompt_tokens": num_tokens,
        "added_ms": 1e3 * median([http_s - model_s for http_s, model_s in requests]),
        "through_http_p50_ms": 1e3 * median([http_s for http_s, _ in requests]),
        "in_model_p50_ms": 1e3 * median([model_s for _, model_s in requests]),
    }


async def _ask(client: Client, model: str, text: str) -> int:
    """One chat request. Returns its number of prompt tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    async with client.post("/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        return int((await response.json())["usage"]["prompt_tokens"])


@contextmanager
def _timed_passes(model: EmbeddedModel) -> Iterator[list[float]]:
    """The seconds of each forward pass while inside."""
    passes: list[float] = []
    compute = model.compute

    def timed_compute(current: PartialPass, tokens: TokenIds) -> torch.Tensor:
        began = time.perf_counter()
        logits = compute(current, tokens)
        passes.append(time.perf_counter() - began)
        return logits

    with patch.object(model, "compute", timed_compute):
        yield passes
