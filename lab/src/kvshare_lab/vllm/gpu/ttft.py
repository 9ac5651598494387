"""
Time to the first token of edited prompts of growing length.

    full     an unrelated prompt, to stock vLLM
    prefix   a prompt of which stock vLLM has 90 % in its prefix cache
    changed  an edited prompt through the proxy, for 1 % and for `--changed` of its tokens, from either place
             of the donor's KV: vLLM's blocks ("device"), or host memory ("host"), for which vLLM forgets its
             prefix cache first; with the stages of proxy and connector
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import takewhile
from statistics import fmean
from typing import Any, NamedTuple, cast

from delta_tree import TokenIds
from kvshare.admin import Costs
from kvshare.sharing.cost import LOAD, PASS, PREFILL, rates_of
from kvshare.vllm_protocol.messages import FinishedReport
from kvshare_lab.bench.figures import by_name
from kvshare_lab.bench.harness import alternate, median
from kvshare_lab.vllm.client import Answer
from kvshare_lab.vllm.gpu.config import Config
from kvshare_lab.vllm.gpu.report import Figures, Progress
from kvshare_lab.vllm.prompts import near_duplicate, prefix_hit, unrelated_prompt
from kvshare_lab.vllm.session import Session, session
from kvshare_lab.vllm.stack import Stack

_SHORTEST = 256  # tokens
_LITTLE = 0.01  # share of the tokens
_MISSED = 0.1  # share of a prompt that is not in the prefix cache
_FULL, _PREFIX = "full", "prefix"
_TOKENS = 2  # of an answer: with one, the first comes after all that the end of a request takes
_PLACES = _DEVICE, _HOST = "device", "host"


class Timed(NamedTuple):
    """`stage_ms`: of the proxy, and of the connector with `vllm_` before the name; empty for stock vLLM."""

    answer: Answer
    report: FinishedReport | None = None
    stage_ms: Mapping[str, float] = {}


async def ttft(servers: Stack, config: Config, progress: Progress) -> Figures:
    """
    A row for each length that there is time for: the shortest, then from the longest down.

    `measured_tokens`: from where on sharing was faster with `--changed` of the tokens replaced, wherever the
    donor's KV lay.
    `learned_tokens`: the same by the rates that the proxy has measured meanwhile.
    """
    rows: list[Figures] = []
    async with session(servers, config.part("ttft")) as bench:
        took_s, found = 0.0, {}
        for length in order(lengths(config.prompt_tokens)):
            if not progress.has_time(str(length), took_s):
                continue
            began = time.monotonic()
            rows.append(await _row(bench, length))
            took_s = time.monotonic() - began if len(rows) > 1 else took_s
            rows.sort(key=lambda row: int(row["tokens"]))
            found = {
                "measured_tokens": first_that_pays(rows, config.changed),
                "lengths": list(rows),
                **learned(await bench.stats("costs"), config.changed),
            }
            progress.keep(found)
    return found


def lengths(longest: int) -> list[int]:
    """Doubling up to the longest, which is the last."""
    shorter = [_SHORTEST << power for power in range(16) if _SHORTEST << power < longest]
    return [*shorter, longest]


def order(ascending: Sequence[int]) -> list[int]:
    """The shortest is a rehearsal; of the others each takes no longer than the one before."""
    return [*ascending[:1], *reversed(ascending[1:])]


async def _row(bench: Session[Config], length: int) -> Figures:
    """Medians of one length; every measured prompt is new to the server that gets it."""
    config, block_size = bench.config, await bench.plain.block_size()
    changes = sorted({_LITTLE, config.changed})
    donor = unrelated_prompt(bench.rng, length)
    for client in (bench.plain, bench.proxy):
        await client.complete(donor)

    async def ask(arm: str) -> Timed:
        await bench.settle()
        if arm == _FULL:
            return Timed(await bench.plain.complete(unrelated_prompt(bench.rng, length), max_tokens=_TOKENS))
        if arm == _PREFIX:
            num_new = max(1, round(_MISSED * length))
            hit = prefix_hit(bench.rng, donor, num_new=num_new, block_size=block_size)
            return Timed(await bench.plain.complete(hit, max_tokens=_TOKENS))
        change, place = edited[arm]
        if place == _HOST:
            await bench.shared.forget_prefixes()
        else:
            await bench.proxy.complete(donor, max_tokens=_TOKENS)  # so that blocks have it
            await bench.settle()
        return await _shared(bench, near_duplicate(bench.rng, donor, changed=change, edits=config.edits))

    edited = {f"{change} {place}": (change, place) for change in changes for place in _PLACES}
    arms = [_FULL, _PREFIX, *edited]
    answers = await alternate(arms, config.repeats, ask)
    full_s = median([each.answer.ttft_s for each in answers[_FULL]])
    figures = {arm: _figures(own, full_s, length) for arm, own in answers.items() if arm != _FULL}
    return {
        "tokens": length,
        "full_ttft_s": full_s,
        "prefix": figures[_PREFIX],
        "changed": [
            {"share": change, "donor": place, **figures[arm]} for arm, (change, place) in edited.items()
        ],
    }


async def _shared(bench: Session[Config], prompt: TokenIds) -> Timed:
    """Through the proxy, until it is stored, with the connector's report."""
    answer, report, stage_ms = await bench.store(prompt, max_tokens=_TOKENS)
    if report.first_token_s is not None:
        stage_ms["vllm_first_token"] = 1e3 * report.first_token_s
    return Timed(answer, report, stage_ms)


def _figures(answers: Sequence[Timed], full_s: float, length: int) -> Figures:
    """
    Of one arm. `reused`: the share of the prompt that was not computed; `from_blocks`: of these tokens, the
    share that was copied from other blocks of vLLM's.
    """
    ttft_s = median([each.answer.ttft_s for each in answers])
    found: Figures = {
        "ttft_s": ttft_s,
        "speedup": full_s / ttft_s,
        "reused": fmean(each.answer.num_cached / length for each in answers),
    }
    reports = [(each.answer.num_cached, each.report) for each in answers if each.report is not None]
    if reports:
        stages = by_name([each.stage_ms for each in answers])
        shares = [report.num_from_blocks / max(1, num_cached) for num_cached, report in reports]
        found["from_blocks"] = fmean(shares)
        found["stage_ms"] = {stage: median(own) for stage, own in stages.items()}
    return found


def first_that_pays(rows: Sequence[Mapping[str, Any]], changed: float) -> int | None:
    """The shortest length from which on all were faster when shared; None if the longest was not."""

    def pays(row: Mapping[str, Any]) -> bool:
        speedups = [each["speedup"] for each in row["changed"] if each["share"] == changed]
        return bool(speedups) and min(speedups) > 1

    paying = list(takewhile(pays, reversed(rows)))
    return int(paying[-1]["tokens"]) if paying else None


def learned(costs: Mapping[str, Any], changed: float) -> Figures:
    """The length from which plans save time, by the proxy's rates; None unless all rates were measured."""
    is_known = {PREFILL, PASS, LOAD} <= set(costs["measured"])
    tokens = rates_of(cast("Costs", costs)).break_even(computed=changed) if is_known else None
    return {"learned_tokens": tokens, "costs": dict(costs)}
