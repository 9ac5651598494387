"""
Sequences of requests: prompts read from a file, requests in a closed loop of clients or in an open loop, and
the figures of `kvshare bench load` over such loads: ratios of both arms, and the bound of their throughput.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare.errors import LogError
from kvshare.logs import ReadReport, read_file
from kvshare.replay.requests import TokenizedRequest
from kvshare.replay.tokens import RequestTokenizer
from kvshare.served_model import DEMO
from kvshare_lab.bench.bound import throughput_bound
from kvshare_lab.bench.figures import by_name, intervals, percentiles
from kvshare_lab.bench.harness import median
from kvshare_lab.bench.random_models import DEMO_VOCAB_SIZE
from kvshare_lab.vllm.client import Answer, Client

_KINDS = {"all": None, "near": True, "unrelated": False}  # of requests, by `is_near`


@dataclass(frozen=True, slots=True, eq=False)
class FilePrompts:
    """The first prompts of a file, in its order, in the tokens of the benchmarks' models."""

    prompts: Sequence[TokenIds]
    description: dict[str, Any]  # for the benchmark's document


def read_prompts(path: Path, *, num_prompts: int, max_tokens: int) -> FilePrompts:
    """
    The first `num_prompts` of a workload, or of any log that replay reads, each cut to `max_tokens` tokens.

    Raises:  LogError where the file has fewer, or a prompt that the benchmarks' models cannot take
    """
    report = ReadReport()
    logged = chain.from_iterable(read_file(path, report))
    requests = RequestTokenizer.load(DEMO).tokenize(islice(logged, num_prompts))
    whole = [_checked(request) for request in requests]
    if len(whole) < num_prompts:
        bad = f", and {report.num_unreadable} lines that cannot be read" if report.num_unreadable else ""
        raise LogError(f"{path.name} has {len(whole)} prompts{bad}; {num_prompts} are needed")
    prompts = [token_ids(prompt[:max_tokens]) for prompt in whole]
    description = {
        "file": path.name,  # without its folder
        "num_prompts": len(prompts),
        "num_tokens": sum(map(len, prompts)),
        "num_cut": sum(len(prompt) > max_tokens for prompt in whole),
        "unreadable": report.unreadable().model_dump(mode="json"),
    }
    return FilePrompts(prompts, description)


def _checked(request: TokenizedRequest) -> TokenIds:
    place = f"{request.logged.source}, line {request.logged.line}"
    if not request.num_tokens:
        raise LogError(f"{place}: the prompt has no tokens, expected one or more")
    if (highest := int(request.token_ids.max())) >= DEMO_VOCAB_SIZE:
        raise LogError(
            f"{place}: token {highest}, expected one below {DEMO_VOCAB_SIZE} of the benchmarks' models"
        )
    return request.token_ids


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """
    One request of a sequence. `is_near`: an edit of a donor that was served before; None if not known.
    `extra`: further keys of its body.
    """

    prompt: TokenIds
    max_tokens: int
    is_near: bool | None
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """A sequence that one arm served: all answers in its order, and what it took."""

    requests: Sequence[Request]
    answers: Sequence[Answer]
    seconds: float
    cpu_s: float = 0.0  # of the arm's processes; this and the next only in a closed loop
    flops: int = 0  # floating-point operations of its prefills

    @property
    def completed_per_s(self) -> float:
        return len(self.answers) / self.seconds

    @property
    def cpu_s_per_request(self) -> float:
        return self.cpu_s / len(self.answers)

    def ttft_s(self, *, is_near: bool | None = None) -> list[float]:
        """Of the near requests, of the others, or of all."""
        pairs = zip(self.requests, self.answers, strict=True)
        return [answer.ttft_s for request, answer in pairs if is_near is None or request.is_near is is_near]


async def play(client: Client, requests: Sequence[Request], *, concurrency: int) -> Load:
    """A closed loop: every client sends the next request as soon as its last one is answered."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(requests))

    async def one_client() -> None:
        for index, request in waiting:
            answers[index] = await _complete(client, request)

    began = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    seconds = time.perf_counter() - began
    return Load(requests, [answers[index] for index in range(len(requests))], seconds)


async def play_open(client: Client, requests: Sequence[Request], arrivals_s: Sequence[float]) -> Load:
    """An open loop: each request is sent so long after the start, whatever has been answered by then."""

    async def one(request: Request, after_s: float) -> Answer:
        await asyncio.sleep(after_s)
        return await _complete(client, request)

    began = time.perf_counter()
    answers = await asyncio.gather(*map(one, requests, arrivals_s))
    return Load(requests, answers, time.perf_counter() - began)


async def _complete(client: Client, request: Request) -> Answer:
    return await client.complete(request.prompt, max_tokens=request.max_tokens, extra=request.extra)


def poisson_arrivals(rng: np.random.Generator, count: int, *, per_s: float) -> list[float]:
    """Seconds from the start to each of `count` random arrivals, on average `per_s` a second."""
    times: list[float] = np.cumsum(rng.exponential(1 / per_s, count)).tolist()
    return times


def closed_figures(
    found: Mapping[str, Mapping[str, Sequence[Load]]], prefills: Sequence[Load]
) -> dict[str, Any]:
    """
    Of the closed loop: medians over the repeats of what stands in `ratios`, their intervals, and each arm's.

    `found`: by kind and arm, of each repeat. `prefills`: by the plain arm, one of each repeat.
    """
    mixed, unrelated = (list(zip(*found[kind].values(), strict=True)) for kind in ("mixed", "unrelated"))
    each = by_name([ratios(*own) for own in zip(mixed, unrelated, prefills, strict=True)])
    middle = {name: median(values) for name, values in each.items()}
    return {
        **middle,
        "unrelated_loss": 1 - middle["unrelated_throughput_ratio"],
        "intervals": intervals(each),
        "ratios": each,
        **{kind: {name: _arm(own) for name, own in both.items()} for kind, both in found.items()},
        "prefill": _arm(prefills),
    }


def ratios(mixed: tuple[Load, Load], unrelated: tuple[Load, Load], prefill: Load) -> dict[str, float]:
    """
    Of one repeat, shared over plain; pairs are (plain, shared).

        throughput_ratio        requests a second
        ttft_p50_ratio          median time to first token of all; `near_ttft_ratio` of edited prompts
        flop_share              c: operations of the prompt tokens computed
        prefill_s, decode_s     P and D: CPU seconds of the plain arm. P is the CPU seconds of `prefill` per
                                operation times the arm's operations, D the rest
        bound                   (P + D) / (c P + D)
        of_bound                throughput_ratio / bound
        unrelated_..._ratio     of the unrelated prompts alone
        unrelated_cpu_loss      CPU seconds a request of vLLM and the proxy over those of vLLM, less 1
    """
    plain, shared = mixed
    plain_unrelated, shared_unrelated = unrelated
    share = shared.flops / plain.flops
    prefill_s = min(plain.cpu_s, prefill.cpu_s * plain.flops / prefill.flops)
    decode_s = plain.cpu_s - prefill_s
    throughput = _throughput_ratio(mixed)
    bound = throughput_bound(prefill_s, decode_s, share)
    near = {"near_ttft_ratio": _ttft_ratio(mixed, is_near=True)} if plain.ttft_s(is_near=True) else {}
    return {
        "throughput_ratio": throughput,
        "bound": bound,
        "of_bound": throughput / bound,
        "flop_share": share,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "ttft_p50_ratio": _ttft_ratio(mixed),
        **near,
        "unrelated_throughput_ratio": _throughput_ratio(unrelated),
        "unrelated_ttft_ratio": _ttft_ratio(unrelated),
        "unrelated_cpu_loss": shared_unrelated.cpu_s_per_request / plain_unrelated.cpu_s_per_request - 1,
    }


def share_figures(both: Mapping[str, Load]) -> dict[str, Any]:
    """
    Of one sequence in a closed loop: `throughput_ratio` as in `ratios`, shared over plain time to first token
    of all and of each kind of request that there is, and each arm's own figures.
    """
    pair = (both["plain"], both["shared"])
    return {
        "throughput_ratio": _throughput_ratio(pair),
        **{name: values[0] for name, values in _ttft_ratios([pair]).items()},
        **{name: _served([own]) for name, own in both.items()},
    }


def open_figures(rate: float, both: Mapping[str, Sequence[Load]]) -> dict[str, Any]:
    """
    Milliseconds to the first token at one rate, by arm, over all repeats; requests a second completed; and
    the ratios `ttft_p50_ratio`, `near_ttft_ratio` and `unrelated_ttft_ratio` as in `ratios`, with intervals.
    """
    arms: dict[str, Any] = {}
    for name, loads in both.items():
        quantiles = {kind: np.percentile(own, (50, 95)) for kind, own in _ttft_s(loads).items()}
        arms[name] = {
            "ttft": {
                kind: {"p50_ms": 1e3 * p50, "p95_ms": 1e3 * p95} for kind, (p50, p95) in quantiles.items()
            },
            "completed_per_s": median([load.completed_per_s for load in loads]),
        }
    pairs = list(zip(*both.values(), strict=True))
    each = _ttft_ratios(pairs)
    middle = {name: median(values) for name, values in each.items()}
    return {"rate": rate, **middle, "intervals": intervals(each), **arms}


def _ttft_ratios(pairs: Sequence[tuple[Load, ...]]) -> dict[str, list[float]]:
    """Of each pair (plain, shared), by the kinds of requests that there are."""
    return {
        f"{'ttft_p50' if kind == 'all' else f'{kind}_ttft'}_ratio": [
            _ttft_ratio((plain, shared), is_near=_KINDS[kind]) for plain, shared in pairs
        ]
        for kind in _ttft_s([plain for plain, _ in pairs])
    }


def _throughput_ratio(pair: tuple[Load, Load]) -> float:
    plain, shared = pair
    return shared.completed_per_s / plain.completed_per_s


def _ttft_ratio(pair: tuple[Load, Load], *, is_near: bool | None = None) -> float:
    plain, shared = (median(each.ttft_s(is_near=is_near)) for each in pair)
    return shared / plain


def _ttft_s(loads: Sequence[Load]) -> dict[str, list[float]]:
    """By the kinds of requests that there are."""
    found = {
        kind: [seconds for load in loads for seconds in load.ttft_s(is_near=is_near)]
        for kind, is_near in _KINDS.items()
    }
    return {kind: seconds for kind, seconds in found.items() if seconds}


def _arm(loads: Sequence[Load]) -> dict[str, Any]:
    return {**_served(loads), "cpu_s_per_request": [load.cpu_s_per_request for load in loads]}


def _served(loads: Sequence[Load]) -> dict[str, Any]:
    gaps = [gap for load in loads for answer in load.answers for gap in answer.gaps_s]
    return {
        "requests": sum(len(load.answers) for load in loads),
        "completed_per_s": [load.completed_per_s for load in loads],
        "ttft": {kind: percentiles(seconds) for kind, seconds in _ttft_s(loads).items()},
        "inter_token": percentiles(gaps) if gaps else None,
    }
