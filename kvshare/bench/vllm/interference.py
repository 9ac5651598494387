"""
`kvshare bench interference --engine vllm`: how long running answers stop for the prompts that come meanwhile.

Some answers run all the time, and every few tokens of theirs another prompt comes, by the same tokens in both
arms, so that it meets the same steps whatever a step takes:
    shared     near-duplicates of a stored prompt, through the proxy: loaded, computed in part, saved
    baseline   stock vLLM; prompts of which its prefix cache has all but as many tokens as `shared` computed
Times between tokens are the client's, over a real socket. On a CPU they show whether anything waits in line
for copies; what a GPU does at the same time they do not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.figures import intervals, percentiles
from kvshare.bench.harness import median, rounds
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Answer, Client
from kvshare.bench.vllm.prompts import prefix_hit, stranger
from kvshare.bench.vllm.reports import Watch
from kvshare.bench.vllm.stack import EditedConfig, Stack, StackOptions, document, stack
from kvshare.errors import EngineError
from kvshare.fleet.client import ControlClient
from kvshare.vllm_protocol.messages import Finished

ARMS = ("baseline", "shared")  # rounds begin with the last one: the first baseline knows what was computed
_STREAM_PROMPT = 48  # tokens
_ROOM = 64  # tokens of context beyond the prompt
_P99 = 99


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    concurrency: int = 8  # answers that run
    tokens: int = 256  # of each
    every: int = 8  # tokens, between two arrivals
    repeats: int = 7

    @property
    def arrivals(self) -> list[int]:
        """At which tokens of the first answer a prompt comes; none so late that the answers end before it."""
        return list(range(self.every, self.tokens - self.every + 1, self.every))


@dataclass(frozen=True, slots=True)
class Scene:
    """One round of an arm. `planned`: in the order of their first tokens; `finished`: theirs, if shared."""

    streams: Sequence[Answer]
    planned: Sequence[Answer]
    finished: Sequence[Finished] = ()

    @property
    def gaps_s(self) -> list[float]:
        return [gap for stream in self.streams for gap in stream.gaps_s]

    @property
    def affected_steps(self) -> float:
        """
        Share of the gaps between tokens in which a planned request was loaded, computed or saved.

        A gap is a step of vLLM's, seen by one answer. A request's loads and passes took what the connector
        reports, up to its first token; its save as long from there on.
        """
        windows = [
            (
                answer.sent_at_s + answer.ttft_s - _seconds(finished, "fetch", "lay", "pass"),
                answer.sent_at_s + answer.ttft_s + _seconds(finished, "save"),
            )
            for answer, finished in zip(self.planned, self.finished, strict=True)
        ]
        found = [
            any(start < after and before < end for start, end in windows)
            for stream in self.streams
            for before, after in zip(_times(stream), _times(stream)[1:], strict=False)
        ]
        return float(np.mean(found))


def run(config: Config) -> dict[str, Any]:
    """Medians over the repeats, each of prompts that are new to all servers."""
    longest = max(config.prompt_tokens, _STREAM_PROMPT + config.tokens)
    vllm = replace(config.vllm, max_model_len=longest + _ROOM, kv_cache_gib=2)
    with stack(StackOptions(vllm=vllm, seed=config.seed)) as servers:
        return asyncio.run(measure(servers, config))


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """The same over servers that run already."""
    rng = np.random.default_rng(config.seed)
    scenes: dict[str, list[Scene]] = {name: [] for name in ARMS}
    async with servers.clients() as (plain, proxy), servers.control() as control:
        block_size = await reports.read_block_size(plain)
        bench = _Interference(config, plain, proxy, control, rng, config.stranger(rng), block_size)
        await bench.start()
        for counts, order in rounds(ARMS, config.repeats):
            for name in order:
                scene = await (bench.shared() if name == "shared" else bench.baseline())
                if counts:
                    scenes[name].append(scene)
    return {
        **document("interference", servers.options, config),
        **summary(scenes["shared"], scenes["baseline"]),
        "arrivals": len(config.arrivals),
        "decisions": bench.watch.decisions,
    }


@dataclass(slots=True)
class _Interference:
    """A donor that both arms have served, and the scenes over it."""

    config: Config
    plain: Client
    proxy: Client
    control: ControlClient
    rng: np.random.Generator
    donor: TokenIds
    block_size: int  # of vLLM's prefix cache
    num_computed: int = 0  # tokens of a planned prompt, in the middle of the last shared scene
    watch: Watch = field(default_factory=Watch)

    async def start(self) -> None:
        for client in (self.plain, self.proxy):
            await client.complete(self.donor)
        await reports.settle(self.proxy)
        await self.watch.look(self.control)
        self.watch.finished.clear()  # of whoever was before us

    async def shared(self) -> Scene:
        prompts = [self.config.edited(self.rng, self.donor) for _ in self.config.arrivals]
        num_before = len(self.watch.finished)
        scene = await self._scene(self.proxy, prompts)
        await reports.settle(self.proxy)
        await self.watch.look(self.control)
        finished = [each for each in self.watch.finished[num_before:] if each.decision == "approx"]
        if len(finished) != len(prompts):
            raise EngineError(
                f"{len(finished)} of {len(prompts)} planned requests shared: {self.watch.decisions}"
            )
        self.num_computed = round(median([each.num_computed for each in finished]))
        return replace(scene, finished=finished)

    async def baseline(self) -> Scene:
        prompts = [
            prefix_hit(self.rng, self.donor, num_new=self.num_computed, block_size=self.block_size)
            for _ in self.config.arrivals
        ]
        return await self._scene(self.plain, prompts)

    async def _scene(self, client: Client, prompts: Sequence[TokenIds]) -> Scene:
        """All answers at once, and the prompts one after the other at tokens of the first answer."""
        waiting = dict(zip(self.config.arrivals, prompts, strict=True))
        planned: list[asyncio.Task[Answer]] = []

        def on_chunk(count: int) -> None:
            for arrival in [arrival for arrival in waiting if arrival <= count]:
                planned.append(asyncio.create_task(client.complete(waiting.pop(arrival))))

        streams = await asyncio.gather(
            *(
                client.complete(
                    stranger(self.rng, _STREAM_PROMPT),
                    max_tokens=self.config.tokens,
                    on_chunk=None if number else on_chunk,
                )
                for number in range(self.config.concurrency)
            )
        )
        answers = await asyncio.gather(*planned)
        return Scene(streams, sorted(answers, key=lambda answer: answer.sent_at_s + answer.ttft_s))


def summary(shared: Sequence[Scene], baseline: Sequence[Scene]) -> dict[str, Any]:
    """
    Medians over the repeats, with their intervals.

        itl_p99_ratio        99th percentile of the running answers' times between tokens, over the baseline's
        itl_max_ratio        the longest such time over the baseline's
        planned_ttft_ratio   median time to first token of what came, over the baseline's
        affected_steps       share of the steps that carried a load, a pass or a save
    """
    each = [_ratios(*scenes) for scenes in zip(shared, baseline, strict=True)]
    by_name = {name: [own[name] for own in each] for name in each[0]}
    return {
        **{name: median(values) for name, values in by_name.items()},
        "intervals": intervals(by_name),
        "ratios": by_name,
        **{name: _arm(scenes) for name, scenes in (("shared", shared), ("baseline", baseline))},
    }


def _ratios(shared: Scene, baseline: Scene) -> dict[str, float]:
    gaps, others = (np.asarray(scene.gaps_s) for scene in (shared, baseline))
    ttft, other_ttft = (median([each.ttft_s for each in scene.planned]) for scene in (shared, baseline))
    return {
        "itl_p99_ratio": float(np.percentile(gaps, _P99) / np.percentile(others, _P99)),
        "itl_max_ratio": float(gaps.max() / others.max()),
        "affected_steps": shared.affected_steps,
        "planned_ttft_ratio": ttft / other_ttft,
    }


def _arm(scenes: Sequence[Scene]) -> dict[str, Any]:
    """Over all repeats."""
    return {
        "inter_token": percentiles([gap for scene in scenes for gap in scene.gaps_s]),
        "planned_ttft": percentiles([answer.ttft_s for scene in scenes for answer in scene.planned]),
        "cached_tokens": median([answer.num_cached for scene in scenes for answer in scene.planned]),
    }


def _times(answer: Answer) -> list[float]:
    """When its tokens came, by `time.perf_counter`."""
    return [answer.sent_at_s + seconds for seconds in answer.token_times_s]


def _seconds(finished: Finished, *stages: str) -> float:
    return sum(finished.stage_seconds.get(stage, 0.0) for stage in stages)
