"""
`kvshare bench replay`: requests a second that the replay of KVShare's policy handles, as the store grows. No
log and no model: prompts that look like text are drawn from a seed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import count, islice, takewhile
from typing import Any

import numpy as np

from delta_tree import token_ids
from kvshare.bench.figures import grown, memory_bytes, percentiles
from kvshare.bench.text_like import TextLikePrompts, common_words
from kvshare.replay.policies.base import BatchEmbeddings, PolicyContext
from kvshare.replay.policies.sharing import SharingPolicy
from kvshare.replay.policies.sharing_options import SharingOptions
from kvshare.replay.requests import LoggedRequest, Outcome, TokenizedRequest
from kvshare.settings import load_settings
from vector_index import Embedder

_BYTES_PER_TOKEN = 1024
_PREFILL_TOKENS_PER_S = 500.0  # so slow that searching by embedding pays
_BATCH = 64  # requests embedded together
_FIRST_STOP = 1000


def run(
    *,
    stored: int = 10_000,
    prompt_tokens: int = 500,
    requests: int = 1000,
    dense: bool = False,
    threads: int | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """
    Replay `stored` requests and `requests` more, one at a time.

    The last `requests` are measured, and as many after 1,000, 10,000, ... `keep` is the time of storing: the
    tree, fingerprints, indexing. What a server does not do is left out: finding out what the gate cost.
    `threads` are the embedder's, all cores if None; beside other work a single one is faster.
    """
    embedder = Embedder.for_bulk(num_threads=threads) if dense else None
    words = [] if embedder is None else common_words(embedder.load().tokenizer.get_vocab())
    embeddings = None if embedder is None else BatchEmbeddings(embedder)
    bench = PolicyContext(
        settings=load_settings(),
        bytes_per_token=_BYTES_PER_TOKEN,
        prefill_tokens_per_s=_PREFILL_TOKENS_PER_S,
        embeddings=embeddings,
        explain_losses=False,
    )
    options = SharingOptions(nominate="both" if dense else "fingerprints")
    arm = SharingPolicy("bench", bench, sharing=options)
    prompts = TextLikePrompts(np.random.default_rng(seed), prompt_tokens)
    stream = _Stream(arm, prompts, words)
    before = memory_bytes()
    windows = []
    try:
        for stop in _stops(stored):
            stream.replay(max(0, stop - stream.num_observed))
            windows.append(stream.measure(requests))
        memory = grown(before)
    finally:
        arm.close()
    return {
        "requests_per_s": windows[-1]["requests_per_s"],
        "plan_p99_ms": windows[-1]["plan"]["p99_ms"],
        "windows": windows,
        "embedded_texts_per_s": None
        if embeddings is None
        else round(embeddings.num_texts / embeddings.seconds, 1),
        "memory_bytes": memory,
    }


class _Stream:
    """Requests that a policy observes one by one, embedded in batches where it searches by embedding."""

    def __init__(self, arm: SharingPolicy, prompts: TextLikePrompts, words: Sequence[str]) -> None:
        self._arm = arm
        self._prompts = prompts
        self._words = words
        self.num_observed = 0

    def replay(self, num_requests: int) -> list[tuple[Outcome, float]]:
        """Each request's outcome, and the seconds it took with its share of the batch's embedding."""
        results: list[tuple[Outcome, float]] = []
        embeddings = self._arm.context.embeddings
        waiting = (self._next() for _ in range(num_requests))
        while batch := list(islice(waiting, _BATCH)):
            began = time.perf_counter()
            if embeddings is not None:
                embeddings.prepare(batch)
            embedding_s = (time.perf_counter() - began) / len(batch)
            for request in batch:
                began = time.perf_counter()
                outcome = self._arm.observe(request)
                results.append((outcome, embedding_s + time.perf_counter() - began))
        return results

    def measure(self, num_requests: int) -> dict[str, Any]:
        """Rates and times of the next requests."""
        num_stored, cpu_began = self.num_observed, time.process_time()
        results = self.replay(num_requests)
        cpu_s = time.process_time() - cpu_began  # drawing the prompts is in it: a few percent
        return {
            "stored": num_stored,
            "requests_per_s": round(num_requests / sum(seconds for _, seconds in results), 1),
            "cpu_ms_per_request": round(1e3 * cpu_s / num_requests, 3),
            "nominate": percentiles([outcome.lookup_s for outcome, _ in results]),
            "plan": percentiles([outcome.plan_s for outcome, _ in results]),
            "keep": percentiles(
                [seconds - outcome.lookup_s - outcome.plan_s for outcome, seconds in results]
            ),
            "hit_rate": sum(outcome.num_hit for outcome, _ in results)
            / (num_requests * self._prompts.num_tokens),
        }

    def _next(self) -> TokenizedRequest:
        number, tokens = self.num_observed, self._prompts.draw()
        self.num_observed += 1
        name = f"conversation {number}"
        return TokenizedRequest(
            index=number,
            logged=LoggedRequest(source="bench", line=number + 1, conversation=name, turn=0, user=name),
            token_ids=tokens,
            answer_ids=token_ids([]),
            text=self._prompts.text(tokens, self._words) if self._words else "",
            time_s=float(number),
        )


def _stops(stored: int) -> list[int]:
    """How many requests are in the store when a window begins: 1,000, 10,000, ... and `stored`."""
    powers = (_FIRST_STOP * 10**power for power in count())
    return [*takewhile(lambda stop: stop < stored, powers), stored]
