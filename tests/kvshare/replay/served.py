"""
One stream of requests through servers and through replays: what was decided, request by request.

Requests come one at a time, each after the one before is stored, indexed and embedded; rates are fixed. All
get the same tokens, the same text for the embedder, and one namespace, which salts the index's digests.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from kvshare.demo import MODEL_PATH
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.engine import (
    Delta,
    Event,
    Finished,
    GenerationRequest,
    SamplingParams,
)
from kvshare.namespace import Namespace
from kvshare.replay.policies.base import BatchEmbeddings, PolicyContext, prompt_text
from kvshare.replay.policies.sharing import SharingPolicy
from kvshare.replay.policies.sharing_options import SharingOptions
from kvshare.replay.requests import TokenizedRequest
from kvshare.replay.stream import RequestStream
from kvshare.replay.tokens import RequestTokenizer
from kvshare.requests import Prompt, SharingReport
from kvshare_lab.vllm.servers import Server
from tests.kvshare.replay.served_by_vllm import replica
from tests.kvshare.replay.stage import (
    BYTES_PER_TOKEN,
    MAX_TOKENS,
    PREFILL_TOKENS_PER_S,
    Decision,
    Departures,
    Served,
    Stage,
    check_whole,
    decision_of,
)
from tests.kvshare.replay.synthetic import request as logged_request

LOCAL = Namespace("t", "tenant", "small", "0", "demo", "float32", "4x2x64", "plain")  # without a replica


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same stream, served and replayed with that server's answers."""

    served: Served
    replayed: list[Decision]
    num_embedded: int  # requests that were searched for by embedding

    @property
    def num_different(self) -> int:
        return sum(a != b for a, b in zip(self.served.decisions, self.replayed, strict=True))


def stream(paths: Sequence[Path], *, num_requests: int, max_tokens: int) -> list[TokenizedRequest]:
    """As many requests of each log, one of each in turn; longer prompts are cut."""
    tokenizer = RequestTokenizer.load(MODEL_PATH)
    logs = []
    for path in paths:
        with RequestStream([path]) as log:
            logs.append(list(tokenizer.tokenize(islice(log, num_requests // len(paths)))))
    mixed = [one for turn in zip(*logs, strict=True) for one in turn]
    return [replace(one, token_ids=one.token_ids[:max_tokens]) for one in mixed]


async def compared(
    stage: Stage, requests: Sequence[TokenizedRequest], *, vllm: Server | None
) -> dict[str, Comparison]:
    """By engine. All of them share one namespace: with a vLLM of `vllm_server`, its replica's."""
    namespace, served = LOCAL, {}
    if vllm is not None:
        async with replica(stage, vllm) as shared:
            namespace = shared.namespace
            served["vllm"] = await shared.serve(requests)
    served["embedded"] = await embedded(stage, requests, namespace)
    return {
        # In a thread: an arm has an event loop of its own.
        name: Comparison(one, *await asyncio.to_thread(replayed, stage, requests, one, namespace.digest))
        for name, one in served.items()
    }


def summary(decisions: Sequence[Decision]) -> dict[str, Any]:
    """Totals of a stream, JSON-ready."""
    return {
        "decisions": dict(Counter(one.decision for one in decisions)),
        "evictions": sum(len(one.evicted) for one in decisions),
        "of_ends_only": sum(bool(num_kept) for one in decisions for _, num_kept in one.evicted),
        "tokens": {
            name: sum(getattr(one, name) for one in decisions)
            for name in ("exact", "copied", "repaired", "computed")
        },
    }


def replayed(
    stage: Stage, requests: Sequence[TokenizedRequest], served: Served, namespace: str
) -> tuple[list[Decision], int]:
    """What a replay decides, with a server's answers as the log's; how often it searched by embedding."""
    bench = PolicyContext(
        settings=stage.settings("replay"),
        bytes_per_token=BYTES_PER_TOKEN,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        embeddings=None if stage.embedder is None else BatchEmbeddings(stage.embedder),
        explain_losses=False,
    )
    options = SharingOptions(nominate="fingerprints" if stage.embedder is None else "both")
    arm = SharingPolicy("kvshare", bench, stage.capacity_tokens, sharing_options=options)
    decisions, num_embedded, departures = [], 0, Departures()
    try:
        for index, (one, answer) in enumerate(zip(requests, served.answers, strict=True)):
            outcome = arm.observe(
                logged_request(
                    index, one.token_ids.tolist(), answer=answer, namespace=namespace, text=one.text
                )
            )
            num_embedded += outcome.embedded
            copied = outcome.num_hit - outcome.num_exact
            decisions.append(
                Decision(
                    "approx" if copied else "exact" if outcome.num_exact else "full",
                    outcome.num_exact,
                    copied,
                    outcome.num_repaired,
                    one.num_tokens - outcome.num_hit,
                    departures.look(index, arm.tree),
                )
            )
    finally:
        arm.close()
    return decisions, num_embedded


async def embedded(stage: Stage, requests: Sequence[TokenizedRequest], namespace: Namespace) -> Served:
    """The stream through the embedded engine."""
    served, departures = Served(), Departures()
    engine = EmbeddedEngine(stage.settings("embedded"))
    with stage.embedding():
        await engine.start()
    try:
        assert engine.server.model.layout.bytes_per_token == BYTES_PER_TOKEN
        for index, one in enumerate(requests):
            report, answer = await _generate(engine, one, namespace)
            evicted = departures.look(index, engine.sharing.tree)
            num_computed = report.num_recomputed + report.num_repaired
            served.decisions.append(decision_of(report, num_computed, evicted))
            served.answers.append(answer)
        check_whole(engine)
    finally:
        await engine.stop()
    return served


async def _generate(
    engine: EmbeddedEngine, one: TokenizedRequest, namespace: Namespace
) -> tuple[SharingReport, list[int]]:
    asked = GenerationRequest(
        request_id="r",
        namespace=namespace,
        prompt=Prompt(one.token_ids, prompt_text(one)),
        sampling=SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0, logprobs=0),
    )
    events: list[Event] = []
    await engine.generate(asked, events.append)
    await engine.settle()
    (finished,) = (event for event in events if isinstance(event, Finished))
    answer = [token.token_id for event in events if isinstance(event, Delta) for token in event.logprobs]
    return finished.report, answer[:-1]  # the last token is never an input
