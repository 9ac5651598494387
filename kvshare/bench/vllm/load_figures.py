"""The figures of `kvshare bench load`: ratios of both arms, and the bound of their throughput."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvshare.bench.bound import throughput_bound
from kvshare.bench.figures import by_name, intervals, percentiles
from kvshare.bench.harness import median
from kvshare.bench.vllm.sequences import Load

_KINDS = {"all": None, "near": True, "unrelated": False}  # of requests, by `is_near`


@dataclass(frozen=True, slots=True)
class Played:
    """A sequence of one arm: CPU seconds of its processes, and floating-point operations of its prefills."""

    load: Load
    cpu_s: float
    flops: int

    @property
    def cpu_s_per_request(self) -> float:
        return self.cpu_s / len(self.load.answers)


def closed_figures(
    found: Mapping[str, Mapping[str, Sequence[Played]]], prefills: Sequence[Played]
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


def ratios(
    mixed: tuple[Played, Played], unrelated: tuple[Played, Played], prefill: Played
) -> dict[str, float]:
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
    near = {"near_ttft_ratio": _ttft_ratio(mixed, is_near=True)} if plain.load.ttft_s(is_near=True) else {}
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


def open_figures(rate: float, both: Mapping[str, Sequence[Load]]) -> dict[str, Any]:
    """Milliseconds to the first token at one rate, by arm, over all repeats; requests a second completed."""
    arms: dict[str, Any] = {}
    for name, loads in both.items():
        quantiles = {kind: np.percentile(own, (50, 95)) for kind, own in _ttft_s(loads).items()}
        arms[name] = {
            "ttft": {
                kind: {"p50_ms": 1e3 * p50, "p95_ms": 1e3 * p95} for kind, (p50, p95) in quantiles.items()
            },
            "completed_per_s": median([load.completed_per_s for load in loads]),
        }
    return {"rate": rate, **arms}


def _throughput_ratio(pair: tuple[Played, Played]) -> float:
    plain, shared = pair
    return shared.load.completed_per_s / plain.load.completed_per_s


def _ttft_ratio(pair: tuple[Played, Played], *, is_near: bool | None = None) -> float:
    plain, shared = (median(each.load.ttft_s(is_near=is_near)) for each in pair)
    return shared / plain


def _ttft_s(loads: Sequence[Load]) -> dict[str, list[float]]:
    """By the kinds of requests that there are."""
    found = {
        kind: [seconds for load in loads for seconds in load.ttft_s(is_near=is_near)]
        for kind, is_near in _KINDS.items()
    }
    return {kind: seconds for kind, seconds in found.items() if seconds}


def _arm(played: Sequence[Played]) -> dict[str, Any]:
    """Of one arm over all repeats."""
    loads = [each.load for each in played]
    gaps = [gap for load in loads for answer in load.answers for gap in answer.gaps_s]
    return {
        "requests": sum(len(load.answers) for load in loads),
        "completed_per_s": [load.completed_per_s for load in loads],
        "ttft": {kind: percentiles(seconds) for kind, seconds in _ttft_s(loads).items()},
        "inter_token": percentiles(gaps) if gaps else None,
        "cpu_s_per_request": [each.cpu_s_per_request for each in played],
    }
