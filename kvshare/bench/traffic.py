"""
`kvshare bench traffic`: how far answers behind shared KV are off on a log, served as by default.

Requests are served one after the other by the embedded engine's parts: its index, its tree, its planner, its
prefill, KV of approximate prompts stored and copied on. Of some approximate ones the full prefill is computed
too, and the answers are compared: the same prompts, nothing set that users do not set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from delta_tree import Span, TokenIds, token_ids
from kvshare.bench.fidelity.measures import divergence, num_agreed, rounded
from kvshare.bench.harness import environment, running_engine
from kvshare.conversation.chat import Chat
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.engines.embedded.prefill import Prefill
from kvshare.kv.attention import PartialPass
from kvshare.kv.sequence import SequenceKV
from kvshare.replay.requests import LoggedRequest
from kvshare.replay.stream import RequestStream
from kvshare.requests import Prediction, Prompt, SharingMode
from kvshare.sharing.memory_keeper import Computed
from kvshare.sharing.plan import NoPlan, Plan

_FORCED = 16  # tokens of the full prefill's answer that both arms read
_HIGH = 0.05  # nats: a plan beyond it counts as bad


async def run(
    *,
    log: Path,
    model: str = "default",
    requests: int = 200,
    every: int = 4,
    free_tokens: int = 0,
    max_deviation: float | None = None,
    threads: int | None = None,
) -> dict[str, Any]:
    """
    Serve the first `requests` of a log, and measure every so many of those that are served approximately.

    `free_tokens`: also compare greedy answers of so many tokens. `max_deviation`: instead of the settings'.
    Raises:  LogError for a file that cannot be replayed; ModelError
    """
    if threads is not None:
        torch.set_num_threads(threads)
    overrides: dict[str, object] = {"model.path": model}
    if max_deviation is not None:
        overrides["sharing.max_deviation"] = max_deviation
    async with running_engine(overrides=overrides) as engine:
        with RequestStream([log]) as stream:
            served = [
                await _serve(engine, await _encoded(engine, request), number, every, free_tokens)
                for number, request in enumerate(islice(stream, requests))
            ]
    return {"log": log.name, **_summary(served), "environment": environment()}


@dataclass(frozen=True, slots=True)
class Served:
    """One request. `measured`: KL and the like where the full prefill was computed, too."""

    num_tokens: int
    num_reused: int
    decision: str
    reason: str | None
    prediction: Prediction | None
    measured: dict[str, float] | None


async def _encoded(engine: EmbeddedEngine, request: LoggedRequest) -> Prompt:
    if request.messages is not None:
        return await engine.encode_chat(Chat(tuple(request.messages)))
    if request.prompt is not None:
        return await engine.encode_text(request.prompt)
    return await engine.encode_tokens(list(request.token_ids or ()))


async def _serve(engine: EmbeddedEngine, prompt: Prompt, number: int, every: int, free_tokens: int) -> Served:
    server, sharing = engine.server, engine.sharing
    runtime, network = server.runtime, server.shared_model
    namespace = engine.namespace(tenant="bench", scope="tenant").digest
    lookup = await sharing.find_plan(namespace, prompt, SharingMode.APPROX)
    plan, size = lookup.plan, prompt.num_tokens
    runtime.keeper.hold(plan)
    kv = network.new_sequence(size + _FORCED + free_tokens)
    if isinstance(plan, Plan):
        with torch.inference_mode():
            kv.lay_out(plan.copies, lookup.segments)
    prefill, logits = Prefill(network, prompt.token_ids, plan, kv), None
    while logits is None:
        _, logits = prefill.advance(max_queries=512)
    sharing.note_use(lookup)
    report = lookup.report(size)
    node = runtime.keeper.commit(Computed(namespace, prompt.token_ids, prefill.plan, kv))
    if node is not None:
        await sharing.remember(node, prompt.text)
    runtime.keeper.release(plan)
    wanted = report.decision == "approx" and number % every == 0
    return Served(
        num_tokens=size,
        num_reused=report.num_cached,
        decision=report.decision,
        reason=report.reason,
        prediction=report.prediction,
        measured=_measured(engine, prompt.token_ids, kv, logits, free_tokens) if wanted else None,
    )


def _measured(
    engine: EmbeddedEngine, tokens: TokenIds, kv: SequenceKV, logits: torch.Tensor, free_tokens: int
) -> dict[str, float]:
    network, size = engine.server.shared_model, len(tokens)
    full = network.new_sequence(size + _FORCED + free_tokens)
    truth = Prefill(network, tokens, NoPlan(), full)
    first = None
    while first is None:
        _, first = truth.advance(max_queries=512)
    answer, exact = _greedy(engine, full, size, first, max(_FORCED, free_tokens))
    found = [logits]
    for place, token in enumerate(answer[: _FORCED - 1]):
        found.append(_next(engine, kv, size + place, token))
    both = min(len(exact), len(found), _FORCED)
    compared = divergence(
        torch.log_softmax(torch.stack(exact[:both]).float(), dim=-1),
        torch.log_softmax(torch.stack(found[:both]).float(), dim=-1),
    ).as_document()
    if not free_tokens:
        return compared
    own, _ = _greedy(engine, kv, size, logits, free_tokens)
    answer = answer[:free_tokens]
    agreed = num_agreed(answer, own) / max(1, len(answer))
    return {**compared, "equal": float(own == answer), "agreement": agreed}


def _greedy(
    engine: EmbeddedEngine, kv: SequenceKV, size: int, logits: torch.Tensor, limit: int
) -> tuple[list[int], list[torch.Tensor]]:
    """The answer behind a prompt, and the logits that each of its tokens was chosen from."""
    ends, chosen, seen = engine.server.eos_token_ids, list[int](), [logits]
    while True:
        chosen.append(int(seen[-1].argmax()))
        if len(chosen) == limit or chosen[-1] in ends:
            return chosen, seen
        seen.append(_next(engine, kv, size + len(chosen) - 1, chosen[-1]))


def _next(engine: EmbeddedEngine, kv: SequenceKV, place: int, token: int) -> torch.Tensor:
    current = PartialPass(kv, (Span(place, place + 1),))
    return engine.server.shared_model.compute(current, token_ids(np.array([token], np.int32)))


def _summary(served: Sequence[Served]) -> dict[str, Any]:
    tokens = sum(each.num_tokens for each in served)
    measured = [each for each in served if each.measured is not None]
    fresh = [each for each in measured if each.prediction is not None and not each.prediction.inherited]
    return {
        "requests": len(served),
        "mean_tokens": tokens / max(1, len(served)),
        "used": sum(each.num_reused for each in served) / max(1, tokens),
        "decisions": Counter(each.decision for each in served),
        "reasons": Counter(each.reason or "-" for each in served),
        "measured": _means(measured),
        "of originals": _means(fresh),
        "of approximate prompts": _means([each for each in measured if each not in fresh]),
    }


def _means(measured: Sequence[Served]) -> dict[str, Any]:
    """Of what was measured, what was expected and what was found."""
    rows = [each.measured for each in measured if each.measured is not None]
    if not rows:
        return {"plans": 0}
    expected = [each.prediction.expected for each in measured if each.prediction is not None]
    kl = np.array([row["kl"] for row in rows])
    return {
        "plans": len(rows),
        "used": float(np.mean([each.num_reused / each.num_tokens for each in measured])),
        "expected": rounded(float(np.mean(expected))),
        "kl_median": rounded(float(np.median(kl))),
        "above": float((kl > _HIGH).mean()),
        **{name: rounded(float(np.mean([row[name] for row in rows]))) for name in rows[0]},
    }
