"""
`kvshare bench parity --engine vllm`: how far planned requests are from stock vLLM's, where both must agree.

Float32, a small random model, two servers, tickets written by hand and no proxy: the KV of a prompt is kept,
then laid back into the very same prompt. The error is the largest difference of a log-probability among the
likeliest tokens of every greedy step, against stock vLLM's full prefill:
    all_placeholders   a single token is copied, all others are computed in our pass
    scattered          about 28 scattered runs are computed over correct KV
    identity           all but the last token is copied
    prefix             an exact prefix is copied, vLLM computes the rest
    mixed_batch        all of these and plain requests at the same time
    preempted          the same, of which some are preempted and resumed
All of it once with a compiled model, as vLLM runs it by default, and once with `--enforce-eager`.
That the laid KV is what answers is shown by `foreign_kv_error`: another prompt's KV, and the error it makes.
`noise` is the error of as many requests that share nothing: another batch rounds otherwise.
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
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Answer, Client, connected
from kvshare.bench.vllm.prompts import stranger
from kvshare.bench.vllm.stack import BenchConfig, Pair, StackOptions, document, pair
from kvshare.bench.vllm.tickets import TicketWriter, copies_of
from kvshare.vllm_protocol.messages import Finished

_MODES = {"compiled": False, "eager": True}  # enforce_eager; compiled is vLLM's default
_CASES = ("all_placeholders", "scattered", "identity", "prefix")
_NUM_TOP = 20  # vLLM's own limit
_SHORT, _LONG = 16, 192  # output tokens; long ones outgrow the KV cache
_BLOCK_SIZE = 32
_PREEMPTING_PROMPTS = 4  # at a time; the KV cache holds these, and little of what they generate


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    tokens: int = 400


def run(config: Config) -> dict[str, Any]:
    """The largest absolute error per mode and case, and over all: `max_abs_logprob_error`."""
    modes = {}
    for name, enforce_eager in _MODES.items():
        options = pair_options(replace(config, eager=enforce_eager))
        with pair(options) as servers:
            modes[name] = asyncio.run(measure(servers, config))
    return summary(options, modes, config)


def pair_options(config: Config) -> StackOptions:
    """A KV cache for a few prompts of this length and little more."""
    vllm = replace(
        config.vllm,
        dtype="float32",
        max_model_len=config.tokens + _LONG + 1,
        max_num_batched_tokens=512,
        num_blocks=_PREEMPTING_PROMPTS * (math.ceil((config.tokens + _SHORT) / _BLOCK_SIZE) + 1),
        block_size=_BLOCK_SIZE,
    )
    return StackOptions(model="small", vllm=vllm, kv_bytes=256 * 2**20, seed=config.seed)


def summary(options: StackOptions, modes: Mapping[str, Mapping[str, Any]], config: Config) -> dict[str, Any]:
    """The document over what was measured in each mode."""
    whole = document("parity", options, config)
    del whole["servers"]["vllm"]["enforce_eager"]  # `modes` has both
    worst = max(mode["max_abs_logprob_error"] for mode in modes.values())
    return {**whole, "max_abs_logprob_error": worst, "modes": modes}


async def measure(servers: Pair, config: Config, *, copies: int = 2) -> dict[str, Any]:
    """One mode: that of servers that run already. Of each case `copies` requests run at the same time."""
    rng = np.random.default_rng(config.seed)
    plain_url, shared_url = servers.plain.url, servers.shared.url
    async with connected(plain_url) as plain, connected(shared_url) as shared, servers.control() as control:
        tickets = TicketWriter(shared, control, "parity")
        await tickets.check()
        bench = _Parity(plain, tickets, rng, config.tokens)
        errors = {name: await bench.error([name]) for name in _CASES}
        batch = [*_CASES, "plain"] * copies
        errors["mixed_batch"] = await bench.error(batch)
        noise = await bench.error(["plain"] * len(batch))
        foreign = await bench.error(["identity"], foreign=True)
        before = await reports.read_counters(shared)
        errors["preempted"] = await bench.error(batch, _LONG)
        counted = (await reports.read_counters(shared)).since(before)
    return {
        "max_abs_logprob_error": max(errors.values()),
        "errors": errors,
        "noise": noise,
        "foreign_kv_error": foreign,
        "decisions": bench.decisions,
        "preemptions": counted.total("vllm:num_preemptions_total"),
    }


@dataclass(slots=True)
class _Parity:
    """Prompts that were kept, and what their planned repetitions differ by."""

    plain: Client
    tickets: TicketWriter
    rng: np.random.Generator
    num_tokens: int
    decisions: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    async def error(self, cases: Sequence[str], max_tokens: int = _SHORT, *, foreign: bool = False) -> float:
        """The largest of a request of each case, all at once. `foreign`: over the KV of another prompt."""
        prompts = [self._stranger() for _ in cases]
        kept = [await self.tickets.keep(self._stranger() if foreign else prompt) for prompt in prompts]
        expected = [
            await self.plain.complete(prompt, max_tokens=max_tokens, num_top=_NUM_TOP) for prompt in prompts
        ]
        found = await asyncio.gather(
            *(
                self._planned(case, prompt, finished, max_tokens)
                for case, prompt, finished in zip(cases, prompts, kept, strict=True)
            )
        )
        return max(distance(one, other) for one, other in zip(found, expected, strict=True))

    def _stranger(self) -> TokenIds:
        return stranger(self.rng, self.num_tokens)

    async def _planned(self, case: str, prompt: TokenIds, kept: Finished, max_tokens: int) -> Answer:
        """The prompt again, its KV laid back as the case has it."""
        copied, exact_length = _copied(case, self.rng, len(prompt))
        copies = [copy for span in copied for copy in copies_of(kept, span, span.start)]
        ticket = self.tickets.ticket(prompt, copies, exact_length=exact_length)
        answer = await self.tickets.ask(prompt, ticket, max_tokens=max_tokens, num_top=_NUM_TOP)
        finished = await self.tickets.finished(ticket)
        said = finished.decision if finished.reason is None else f"{finished.decision}: {finished.reason}"
        self.decisions[case][said] += 1
        return answer


def distance(found: Answer, expected: Answer) -> float:
    """
    Largest difference of a log-probability among the likeliest tokens, up to the first token that differs.

    There the margin of the expected token counts as well: at even odds rounding may go either way.
    """
    error = 0.0
    for place, (mine, theirs) in enumerate(zip(found.tops, expected.tops, strict=True)):
        error = max(error, _top_distance(mine, theirs), _top_distance(theirs, mine))
        if found.token_ids[place] != expected.token_ids[place]:
            return max(error, expected.margins[place])
    return error


def _top_distance(mine: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """A token that the other side does not name is at most as likely there as the last that it names."""
    last = min(theirs.values())
    return max(
        abs(value - theirs[token]) if token in theirs else max(0.0, value - last)
        for token, value in mine.items()
    )


def _copied(case: str, rng: np.random.Generator, num_tokens: int) -> tuple[Sequence[Span], int]:
    """What a case copies, and how much of it is an exact prefix."""
    last = num_tokens - 1
    match case:
        case "all_placeholders":
            return [Span(last - 1, last)], 0
        case "scattered":  # about 28 runs of 1 to 12 tokens are left open
            starts = np.unique(rng.integers(0, num_tokens // 14, 28)) * 14
            runs = [Span(int(start), int(start + rng.integers(1, 13))) for start in starts]
            return gaps([run for run in runs if run.end < last], last), 0
        case "identity":
            return [Span(0, last)], 0
        case "prefix":
            return [Span(0, num_tokens // 2)], num_tokens // 2
    return [], 0
