"""
`kvshare bench traffic`: how far answers over shared KV deviate on a log that is served with default settings.

Requests are served one after the other by the embedded engine's parts: its index, tree, planner and prefill.
KV of approximate prompts is stored too, and copied again. For some approximate requests the full prefill is
computed as well, and the answers are compared.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import torch

from delta_tree import TokenIds
from kvshare.bench.direct import greedy, prefilled
from kvshare.bench.fidelity.measures import divergence, num_agreed, rounded
from kvshare.bench.fidelity.trial import NUM_FORCED
from kvshare.bench.harness import environment, running_engine
from kvshare.conversation.chat import Chat
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.kv.sequence import SequenceKV
from kvshare.replay.requests import LoggedRequest
from kvshare.replay.stream import RequestStream
from kvshare.requests import Prompt, SharingMode, SharingReport
from kvshare.sharing.memory_keeper import Computed
from kvshare.sharing.plan import NoPlan, Plan

_HIGH = 0.05  # nats: the KL above which an answer counts in `above`


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
    Serve the first `requests` of a log, and measure the approximate ones among each `every`-th of them.

    `free_tokens`: also compare greedy answers of so many tokens. `max_deviation`: overrides the setting.
    Raises:  LogError for a file that cannot be replayed; ModelError
    """
    if threads is not None:
        torch.set_num_threads(threads)
    overrides = {"model.path": model, "sharing.max_deviation": max_deviation}
    served = []
    async with running_engine(overrides=overrides) as engine:
        with RequestStream([log]) as stream:
            for number, request in enumerate(islice(stream, requests)):
                prompt = await _encoded(engine, request)
                served.append(await _serve(engine, prompt, free_tokens, is_measured=number % every == 0))
    return {"log": log.name, **_summary(served), "environment": environment()}


class Served(NamedTuple):
    """One request. `measured`: KL and further figures where the full prefill was computed, else empty."""

    report: SharingReport
    measured: Mapping[str, float]


async def _encoded(engine: EmbeddedEngine, request: LoggedRequest) -> Prompt:
    if request.messages is not None:
        return await engine.encode_chat(Chat(request.messages))
    if request.prompt is not None:
        return await engine.encode_text(request.prompt)
    return await engine.encode_tokens(request.token_ids or ())


async def _serve(engine: EmbeddedEngine, prompt: Prompt, free_tokens: int, *, is_measured: bool) -> Served:
    sharing, keeper, network = engine.sharing, engine.server.runtime.keeper, engine.server.shared_model
    namespace = engine.namespace(tenant="bench", scope="tenant").digest
    lookup = await sharing.find_plan(namespace, prompt, SharingMode.APPROX)
    keeper.hold(lookup.plan)
    kv = network.new_sequence(prompt.num_tokens + NUM_FORCED + free_tokens)
    if isinstance(lookup.plan, Plan):
        with torch.inference_mode():
            kv.write_copies(lookup.plan.copies, lookup.segments)
    plan, logits = prefilled(network, prompt.token_ids, lookup.plan, kv)
    sharing.note_use(lookup)
    node = keeper.store(Computed(namespace, prompt.token_ids, plan, kv))
    if node is not None:
        await sharing.remember(node, prompt.text)
    keeper.release(lookup.plan)
    report = lookup.report(prompt.num_tokens)
    is_measured = is_measured and report.decision == "approx"
    measured = _measured(engine, prompt.token_ids, kv, logits, free_tokens) if is_measured else {}
    return Served(report, measured)


def _measured(
    engine: EmbeddedEngine, tokens: TokenIds, kv: SequenceKV, logits: torch.Tensor, free_tokens: int
) -> Mapping[str, float]:
    """The shared arm's KV and first logits, compared with a full prefill, along that one's answer."""
    network, size, ends = engine.server.shared_model, len(tokens), engine.server.eos_token_ids
    full = network.new_sequence(size + NUM_FORCED + free_tokens)
    _, first = prefilled(network, tokens, NoPlan(), full)
    answer, exact = greedy(network, full, size, first, limit=max(NUM_FORCED, free_tokens), ends=ends)
    places = enumerate(answer[: NUM_FORCED - 1], size)
    found = [logits, *(network.next_logits(kv, place, token) for place, token in places)]
    both = min(len(exact), len(found))
    compared = divergence(
        torch.log_softmax(torch.stack(exact[:both]).float(), dim=-1),
        torch.log_softmax(torch.stack(found[:both]).float(), dim=-1),
    ).as_document()
    if not free_tokens:
        return compared
    own, _ = greedy(network, kv, size, logits, limit=free_tokens, ends=ends)
    answer = answer[:free_tokens]
    return {**compared, "equal": float(own == answer), "agreement": num_agreed(answer, own) / len(answer)}


def _summary(served: Sequence[Served]) -> dict[str, Any]:
    reports = [each.report for each in served]
    tokens = sum(report.num_prompt_tokens for report in reports)
    measured = [each for each in served if each.measured]
    fresh = [each for each in measured if each.report.prediction and not each.report.prediction.inherited]
    return {
        "requests": len(served),
        "mean_tokens": tokens / max(1, len(served)),
        "used": sum(report.num_cached for report in reports) / max(1, tokens),
        "decisions": Counter(report.decision for report in reports),
        "reasons": Counter(report.reason or "-" for report in reports),
        "measured": _means(measured),
        "of originals": _means(fresh),
        "of approximate prompts": _means([each for each in measured if each not in fresh]),
    }


def _means(measured: Sequence[Served]) -> dict[str, Any]:
    """Of the measured requests: what was expected, and what was found."""
    if not measured:
        return {"plans": 0}
    reports, rows = zip(*measured, strict=True)
    kl = [row["kl"] for row in rows]
    return {
        "plans": len(rows),
        "used": fmean(report.num_cached / report.num_prompt_tokens for report in reports),
        "expected": rounded(fmean(each.prediction.expected for each in reports if each.prediction)),
        "kl_median": rounded(median(kl)),
        "above": fmean(value > _HIGH for value in kl),
        **{name: rounded(fmean(row[name] for row in rows)) for name in rows[0]},
    }
