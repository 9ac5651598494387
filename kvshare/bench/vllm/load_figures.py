"""What `kvshare bench load` makes of its sequences: ratios of both arms, and the best there could be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvshare.bench.bound import throughput_bound
from kvshare.bench.figures import intervals
from kvshare.bench.harness import median
from kvshare.bench.vllm.sequences import Load, figures

_QUANTILES = (50, 95)


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
    each = [
        ratios(*own) for own in zip(mixed, unrelated, prefills, strict=True)
    ]  # (plain, shared) of both kinds
    by_name = {name: [own[name] for own in each if name in own] for name in each[0]}
    middle = {name: median(values) for name, values in by_name.items()}
    return {
        **middle,
        "unrelated_loss": 1 - middle["unrelated_throughput_ratio"],
        "intervals": intervals(by_name),
        "ratios": by_name,
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
        prefill_s, decode_s     P and D: CPU seconds of the plain arm; P is what `prefill` took per operation,
                                times the arm's operations, D all the rest
        bound                   (P + D) / (c P + D)
        of_bound                throughput_ratio / bound
        unrelated_..._ratio     of the unrelated prompts alone
        unrelated_cpu_loss      CPU seconds a request of vLLM and the proxy over those of vLLM, less 1
    """
    (plain, shared), (plain_unrelated, shared_unrelated) = mixed, unrelated
    share = shared.flops / plain.flops
    prefill_s = min(plain.cpu_s, prefill.cpu_s * plain.flops / prefill.flops)
    decode_s = plain.cpu_s - prefill_s
    throughput = shared.load.completed_per_s / plain.load.completed_per_s
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
        "unrelated_throughput_ratio": shared_unrelated.load.completed_per_s
        / plain_unrelated.load.completed_per_s,
        "unrelated_ttft_ratio": _ttft_ratio(unrelated),
        "unrelated_cpu_loss": shared_unrelated.cpu_s_per_request / plain_unrelated.cpu_s_per_request - 1,
    }


def open_figures(rate: float, both: Mapping[str, Sequence[Load]]) -> dict[str, Any]:
    """Milliseconds to the first token at one rate, by arm, over all repeats; requests a second completed."""
    return {
        "rate": rate,
        **{
            name: {
                "ttft": {
                    kind: _quantiles([s for load in loads for s in load.ttft_s(is_near=is_near)])
                    for kind, is_near in (("all", None), ("near", True), ("unrelated", False))
                    if any(load.ttft_s(is_near=is_near) for load in loads)
                },
                "completed_per_s": median([load.completed_per_s for load in loads]),
            }
            for name, loads in both.items()
        },
    }


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}_ms": 1e3 * float(np.percentile(np.asarray(seconds), q)) for q in _QUANTILES}


def _ttft_ratio(pair: tuple[Played, Played], *, is_near: bool | None = None) -> float:
    plain, shared = (median(each.load.ttft_s(is_near=is_near)) for each in pair)
    return shared / plain


def _arm(played: Sequence[Played]) -> dict[str, Any]:
    cpu = [each.cpu_s_per_request for each in played]
    return {**figures([each.load for each in played]), "cpu_s_per_request": cpu}
