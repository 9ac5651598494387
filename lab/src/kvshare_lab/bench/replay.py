"""
`kvshare bench replay`: requests a second that the replay of KVShare's policy handles, as the store grows. No
log and no model: prompts that look like text are drawn from a seed.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count, islice, takewhile
from typing import Any

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare.extras import require
from kvshare.logs.requests import LoggedRequest
from kvshare.replay.policies.base import BatchEmbeddings, PolicyContext
from kvshare.replay.policies.sharing import SharingPolicy
from kvshare.replay.policies.sharing_options import SharingOptions
from kvshare.replay.requests import Outcome, TokenizedRequest, batches
from kvshare.settings import load_settings
from kvshare_lab.bench.figures import grown, memory_bytes, percentiles
from kvshare_lab.bench.text_like import as_text, common_words, text_like_prompts
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
    tree, fingerprints, indexing. What the gate cost is not computed, as in a server.
    `threads` are the embedder's, all cores if None; beside other work a single one is faster.
    """
    if dense:
        require("replay", what="`kvshare bench replay --dense`")
    embedder = Embedder.for_bulk(num_threads=threads) if dense else None
    words = [] if embedder is None else common_words(embedder.load().vocabulary())
    embeddings = None if embedder is None else BatchEmbeddings(embedder)
    context = PolicyContext(
        settings=load_settings(),
        bytes_per_token=_BYTES_PER_TOKEN,
        prefill_tokens_per_s=_PREFILL_TOKENS_PER_S,
        embeddings=embeddings,
        explain_losses=False,
    )
    options = SharingOptions(nominate="both" if dense else "fingerprints")
    drawn = _requests(text_like_prompts(np.random.default_rng(seed), prompt_tokens), words)
    powers = (_FIRST_STOP * 10**power for power in count())
    num_stored, windows = 0, []
    with closing(SharingPolicy("bench", context, sharing_options=options)) as policy:
        before = memory_bytes()
        for stop in (*takewhile(lambda stop: stop < stored, powers), stored):
            _replay(policy, islice(drawn, max(0, stop - num_stored)))
            num_stored = max(stop, num_stored)
            measured = _measured(policy, islice(drawn, requests), prompt_tokens)
            windows.append({"stored": num_stored, **measured})
            num_stored += requests
        memory = grown(before)
    rate = None if embeddings is None else round(embeddings.num_texts / embeddings.seconds, 1)
    return {
        "requests_per_s": windows[-1]["requests_per_s"],
        "plan_p99_ms": windows[-1]["plan"]["p99_ms"],
        "windows": windows,
        "embedded_texts_per_s": rate,
        "memory_bytes": memory,
    }


def _requests(prompts: Iterator[TokenIds], words: Sequence[str]) -> Iterator[TokenizedRequest]:
    """A request for each prompt; it has a text if there are words for it."""
    for number, tokens in enumerate(prompts):
        name = f"conversation {number}"
        yield TokenizedRequest(
            index=number,
            logged=LoggedRequest(source="bench", line=number + 1, conversation=name, turn=0, user=name),
            token_ids=tokens,
            answer_ids=token_ids([]),
            text=as_text(tokens, words) if words else "",
            time_s=float(number),
        )


def _replay(policy: SharingPolicy, requests: Iterator[TokenizedRequest]) -> list[tuple[Outcome, float]]:
    """Each request's outcome, and the seconds it took with its share of the batch's embedding."""
    results: list[tuple[Outcome, float]] = []
    embeddings = policy.context.embeddings
    for batch in batches(requests, _BATCH):
        began = time.perf_counter()
        if embeddings is not None:
            embeddings.prepare(batch)
        embedding_s = (time.perf_counter() - began) / len(batch)
        for request in batch:
            began = time.perf_counter()
            outcome = policy.observe(request)
            results.append((outcome, embedding_s + time.perf_counter() - began))
    return results


def _measured(policy: SharingPolicy, requests: Iterator[TokenizedRequest], num_tokens: int) -> dict[str, Any]:
    """Rates and times of these requests, which have so many tokens each."""
    cpu_began = time.process_time()
    results = _replay(policy, requests)
    cpu_s = time.process_time() - cpu_began  # drawing the prompts is in it: a few percent
    outcomes, seconds = zip(*results, strict=True)
    return {
        "requests_per_s": round(len(results) / sum(seconds), 1),
        "cpu_ms_per_request": round(1e3 * cpu_s / len(results), 3),
        "nominate": percentiles([outcome.lookup_s for outcome in outcomes]),
        "plan": percentiles([outcome.plan_s for outcome in outcomes]),
        "store": percentiles([taken - outcome.lookup_s - outcome.plan_s for outcome, taken in results]),
        "hit_rate": sum(outcome.num_hit for outcome in outcomes) / (len(results) * num_tokens),
    }
