"""
`kvshare bench interference --engine vllm`: how long running answers stop for prompts that arrive meanwhile.

Some answers run all the time, and after every few of their tokens another prompt arrives: after the same
tokens in both arms, so that it meets the same steps however long a step takes.
    shared     near-duplicates of a stored prompt, through the proxy: loaded, computed in part, saved
    baseline   prefix hits of equal computed length, to stock vLLM
Times between tokens are the client's, over a real socket. On a CPU they show whether anything waits for
copies; they do not show what a GPU does at the same time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.errors import EngineError
from kvshare.vllm_protocol.messages import FinishedReport
from kvshare_lab.bench.figures import by_name, intervals, percentiles
from kvshare_lab.bench.harness import alternate, median
from kvshare_lab.vllm.client import Answer, Client
from kvshare_lab.vllm.prompts import prefix_hit, unrelated_prompt
from kvshare_lab.vllm.session import Session, run_benchmark
from kvshare_lab.vllm.stack import EditedConfig

_ARMS = ("baseline", "shared")  # rounds begin with the last one: the first baseline knows what was computed
_STREAM_PROMPT = 48  # tokens


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    concurrency: int = 8  # answers that run
    tokens: int = 256  # of each
    every: int = 8  # tokens, between two arrivals
    repeats: int = 7

    @property
    def longest(self) -> int:
        return max(self.prompt_tokens, _STREAM_PROMPT + self.tokens)

    @property
    def arrivals(self) -> list[int]:
        """The tokens of the first answer after which a prompt arrives, early enough for it to be served."""
        return list(range(self.every, self.tokens - self.every + 1, self.every))


@dataclass(frozen=True, slots=True)
class Scene:
    """One round of an arm. `planned`: in the order of their first tokens; `finished`: theirs, if shared."""

    streams: Sequence[Answer]
    planned: Sequence[Answer]
    finished: Sequence[FinishedReport] = ()

    @property
    def gaps_s(self) -> list[float]:
        return [gap for stream in self.streams for gap in stream.gaps_s]

    @property
    def affected_steps(self) -> float:
        """
        Share of the gaps between tokens in which a planned request was loaded, computed or saved.

        A gap is a step of vLLM, seen by one answer. By the seconds that the connector reports, a request is
        loaded and computed right before its first token, and saved right after it.
        """
        windows = []
        for answer, finished in zip(self.planned, self.finished, strict=True):
            seconds, first = finished.stage_seconds, answer.sent_at_s + answer.ttft_s
            before = sum(seconds.get(stage, 0.0) for stage in ("verify", "write", "pass"))
            windows.append((first - before, first + seconds.get("save", 0.0)))
        times = ([each.sent_at_s + after for after in each.token_times_s] for each in self.streams)
        steps = chain.from_iterable(map(pairwise, times))
        return float(np.mean([any(a < end and start < b for a, b in windows) for start, end in steps]))


async def measure(bench: Session[Config]) -> dict[str, Any]:
    """Medians over the repeats, each of prompts that are new to all servers."""
    arrivals = bench.config.arrivals
    donor, block_size = bench.unrelated(), await bench.plain.block_size()
    await bench.begin([donor])
    num_computed = 0  # tokens of a planned prompt, the median of the last shared scene

    async def play(arm: str) -> Scene:
        nonlocal num_computed
        if arm == "baseline":
            hit = partial(prefix_hit, bench.rng, donor, num_new=num_computed, block_size=block_size)
            return await _scene(bench, bench.plain, [hit() for _ in arrivals])
        scene = await _scene(bench, bench.proxy, [bench.edited(donor) for _ in arrivals])
        reports = await bench.watch.look()
        finished = [each for each in reports if each.decision == "approx"]
        if len(finished) != len(arrivals):
            shared = f"{len(finished)} of {len(arrivals)} planned requests were shared"
            reasons = Counter(each.reason or "none" for each in reports if each.decision != "approx")
            raise EngineError(f"{shared}, expected all; of the others the reasons were {dict(reasons)}")
        num_computed = round(median([each.num_computed for each in finished]))
        return replace(scene, finished=finished)

    scenes = await alternate(_ARMS, bench.config.repeats, play)
    figures = summary(scenes["shared"], scenes["baseline"])
    return {**figures, "arrivals": len(arrivals), "decisions": bench.watch.decisions}


async def _scene(bench: Session[Config], client: Client, prompts: Sequence[TokenIds]) -> Scene:
    """All answers at once, and the prompts one after the other, by the tokens of the first answer."""
    waiting = dict(zip(bench.config.arrivals, prompts, strict=True))
    planned: list[asyncio.Task[Answer]] = []

    def on_chunk(count: int) -> None:
        for arrival in [arrival for arrival in waiting if arrival <= count]:
            planned.append(asyncio.create_task(client.complete(waiting.pop(arrival))))

    streams = await asyncio.gather(
        *(
            client.complete(
                unrelated_prompt(bench.rng, _STREAM_PROMPT),
                max_tokens=bench.config.tokens,
                on_chunk=None if number else on_chunk,
            )
            for number in range(bench.config.concurrency)
        )
    )
    answers = await asyncio.gather(*planned)
    await bench.settle()
    return Scene(streams, sorted(answers, key=lambda answer: answer.sent_at_s + answer.ttft_s))


def summary(shared: Sequence[Scene], baseline: Sequence[Scene]) -> dict[str, Any]:
    """
    Medians over the repeats, with their intervals.

        itl_p99_ratio        99th percentile of the running answers' times between tokens, over the baseline's
        itl_max_ratio        the longest such time, over the baseline's
        affected_steps       share of the steps that carried a load, a pass or a save
        planned_ttft_ratio   median time to first token of the prompts that arrived, over the baseline's
    """
    ratios = by_name([_ratios(*scenes) for scenes in zip(shared, baseline, strict=True)])
    return {
        **{name: median(values) for name, values in ratios.items()},
        "intervals": intervals(ratios),
        "ratios": ratios,
        "shared": _arm(shared),
        "baseline": _arm(baseline),
    }


def _ratios(shared: Scene, baseline: Scene) -> dict[str, float]:
    ttft, other_ttft = (median([each.ttft_s for each in scene.planned]) for scene in (shared, baseline))
    p99, longest = np.percentile(shared.gaps_s, (99, 100)) / np.percentile(baseline.gaps_s, (99, 100))
    return {
        "itl_p99_ratio": float(p99),
        "itl_max_ratio": float(longest),
        "affected_steps": shared.affected_steps,
        "planned_ttft_ratio": ttft / other_ttft,
    }


def _arm(scenes: Sequence[Scene]) -> dict[str, Any]:
    planned = [answer for scene in scenes for answer in scene.planned]
    return {
        "inter_token": percentiles([gap for scene in scenes for gap in scene.gaps_s]),
        "planned_ttft": percentiles([answer.ttft_s for answer in planned]),
        "cached_tokens": median([answer.num_cached for answer in planned]),
    }


run = partial(run_benchmark, "interference", measure)
