"""
`kvshare bench traffic`: how far answers over shared KV deviate on a log that is served with default settings.

Requests are served one after the other by the embedded engine's parts: its index, tree, planner and prefill.
KV of approximate prompts is stored too, and copied again. For some approximate requests the full prefill is
computed as well, and the answers are compared.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from kvshare.conversation.chat import Chat
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.logs.requests import LoggedRequest
from kvshare.replay.stream import RequestStream
from kvshare.requests import Prompt
from kvshare_lab.bench.harness import environment, running_engine
from kvshare_lab.bench.served import Served, full_answer, serve
from kvshare_lab.fidelity.measures import rounded

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
                full = partial(full_answer, engine, prompt, free_tokens) if number % every == 0 else None
                served.append(await serve(engine, prompt, full=full, free_tokens=free_tokens))
    return {"log": log.name, **_summary(served), "environment": environment()}


async def _encoded(engine: EmbeddedEngine, request: LoggedRequest) -> Prompt:
    if request.messages is not None:
        return await engine.encode_chat(Chat(request.messages))
    if request.prompt is not None:
        return await engine.encode_text(request.prompt)
    return await engine.encode_tokens(request.token_ids or ())


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
