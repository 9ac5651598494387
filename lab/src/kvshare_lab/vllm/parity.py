"""
`kvshare bench parity --engine vllm`: how far planned requests are from stock vLLM's, where both must agree.

Float32, a small random model, two servers, tickets made here and no proxy: the KV of a prompt is stored, then
written into a request for the same prompt. The error is the largest difference of a log-probability among the
likeliest tokens of every greedy step, compared with stock vLLM's full prefill:
    all_placeholders   a single token is copied, all others are computed in our pass
    scattered          about 28 scattered runs are computed over correct KV
    identity           all but the last token is copied
    prefix             an exact prefix is copied, vLLM computes the rest
    mixed_batch        all of these and plain requests at the same time
    preempted          the same, of which some are preempted and resumed
All of it with a compiled model, as vLLM runs it by default, and again with `--enforce-eager`. `noise` is the
error of as many requests that share nothing, as other batches round differently. `foreign_kv_error` is the
error with another prompt's KV: it shows that the written KV decides the answer.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from delta_tree import Span, TokenIds, gaps
from kvshare.vllm_protocol.messages import FinishedReport
from kvshare_lab.bench.direct import scattered_runs
from kvshare_lab.vllm.client import Answer
from kvshare_lab.vllm.prompts import unrelated_prompt
from kvshare_lab.vllm.session import Session, measured
from kvshare_lab.vllm.stack import BenchConfig, StackOptions, document, pair
from kvshare_lab.vllm.tickets import TicketWriter, copies_of

_MODES = {"compiled": False, "eager": True}  # enforce_eager; compiled is vLLM's default
_CASES = ("all_placeholders", "scattered", "identity", "prefix")
_NUM_TOP = 20  # vLLM's own limit
_SHORT, _LONG = 16, 192  # output tokens; long ones outgrow the KV cache
_BLOCK_SIZE = 32
_PREEMPTING_PROMPTS = 4  # at a time; the KV cache holds these, and little of what they generate


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    tokens: int = 400

    @property
    def own_model(self) -> str:
        return "small"

    @property
    def options(self) -> StackOptions:
        """A KV cache for a few prompts of this length and little more."""
        blocks_per_prompt = math.ceil((self.tokens + _SHORT) / _BLOCK_SIZE) + 1
        vllm = replace(
            self.vllm,
            dtype="float32",
            max_model_len=self.tokens + _LONG + 1,
            max_num_batched_tokens=512,
            num_blocks=_PREEMPTING_PROMPTS * blocks_per_prompt,
            block_size=_BLOCK_SIZE,
        )
        return self.stack_of(vllm, kv_bytes=256 * 2**20)


def run(config: Config) -> dict[str, Any]:
    """The largest absolute error per mode and case, and over all: `max_abs_logprob_error`."""
    modes = {}
    for name, enforce_eager in _MODES.items():
        with pair(replace(config, eager=enforce_eager).options) as servers:
            modes[name] = asyncio.run(measured(measure, servers, config))
    return summary(modes, config)


def summary(modes: Mapping[str, Mapping[str, Any]], config: Config) -> dict[str, Any]:
    """The document over the figures of each mode."""
    head = document("parity", config.options, config)
    del head["servers"]["vllm"]["enforce_eager"]  # `modes` has both
    worst = max(mode["max_abs_logprob_error"] for mode in modes.values())
    return {**head, "max_abs_logprob_error": worst, "modes": modes}


async def measure(bench: Session[Config], *, copies: int = 2, preempts: bool = True) -> dict[str, Any]:
    """One mode. Of each case `copies` requests run at the same time; `preempts`: with long answers, too."""
    tickets = TicketWriter(bench.shared, bench.watch, "parity")
    await tickets.check()
    parity = _Parity(bench, tickets)
    errors = {name: await parity.error([name]) for name in _CASES}
    batch = [*_CASES, "plain"] * copies
    errors["mixed_batch"] = await parity.error(batch)
    noise = await parity.error(["plain"] * len(batch), _LONG if preempts else _SHORT)
    foreign = await parity.error(["identity"], foreign=True)
    before = await bench.shared.counters()
    if preempts:
        errors["preempted"] = await parity.error(batch, _LONG)
    counted = (await bench.shared.counters()).since(before)
    return {
        "max_abs_logprob_error": max(errors.values()),
        "errors": errors,
        "noise": noise,
        "foreign_kv_error": foreign,
        "decisions": parity.decisions,
        "preemptions": counted.total("vllm:num_preemptions_total"),
    }


@dataclass(slots=True)
class _Parity:
    """Stored prompts, and the differences of their planned repetitions."""

    bench: Session[Config]
    tickets: TicketWriter
    decisions: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    async def error(self, cases: Sequence[str], max_tokens: int = _SHORT, *, foreign: bool = False) -> float:
        """The largest error of a request of each case, all at once. `foreign`: over another prompt's KV."""
        rng, num_tokens, plain = self.bench.rng, self.bench.config.tokens, self.bench.plain
        prompts, donors = ([unrelated_prompt(rng, num_tokens) for _ in cases] for _ in range(2))
        stored = [await self.tickets.store(prompt) for prompt in (donors if foreign else prompts)]
        expected = [
            await plain.complete(prompt, max_tokens=max_tokens, num_top=_NUM_TOP) for prompt in prompts
        ]
        requests = zip(cases, prompts, stored, strict=True)
        found = await asyncio.gather(*(self._planned(*request, max_tokens) for request in requests))
        return max(distance(one, other) for one, other in zip(found, expected, strict=True))

    async def _planned(self, case: str, prompt: TokenIds, stored: FinishedReport, max_tokens: int) -> Answer:
        """The prompt again, with the stored KV that the case copies."""
        copied, exact_length = _copied(case, self.bench.rng, len(prompt))
        copies = [copy for span in copied for copy in copies_of(stored, span, span.start)]
        answer, finished = await self.tickets.ask(
            prompt, copies, exact_length=exact_length, max_tokens=max_tokens, num_top=_NUM_TOP
        )
        reason = "" if finished.reason is None else f": {finished.reason}"
        self.decisions[case][finished.decision + reason] += 1
        return answer


def distance(found: Answer, expected: Answer) -> float:
    """
    Largest difference of a log-probability among the likeliest tokens, up to the first token that differs.

    There the margin of the expected token counts as well: rounding decides between equally likely tokens.
    """
    error = 0.0
    for place, (mine, theirs) in enumerate(zip(found.tops, expected.tops, strict=True)):
        error = max(error, _top_distance(mine, theirs), _top_distance(theirs, mine))
        if found.token_ids[place] != expected.token_ids[place]:
            return max(error, expected.margins[place])
    return error


def _top_distance(mine: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """A token that the other side does not list is at most as likely there as the last one that it lists."""
    last = min(theirs.values())
    return max(
        abs(value - theirs[token]) if token in theirs else max(0.0, value - last)
        for token, value in mine.items()
    )


def _copied(case: str, rng: np.random.Generator, num_tokens: int) -> tuple[Sequence[Span], int]:
    """The spans that a case copies, and the length of the exact prefix among them."""
    last = num_tokens - 1
    match case:
        case "all_placeholders":
            return [Span(last - 1, last)], 0
        case "scattered":
            return gaps(scattered_runs(rng, num_tokens), last), 0
        case "identity":
            return [Span(0, last)], 0
        case "prefix":
            return [Span(0, num_tokens // 2)], num_tokens // 2
    return [], 0
