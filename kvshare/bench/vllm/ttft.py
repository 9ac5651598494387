"""
`kvshare bench ttft --engine vllm`: time to first token of a prompt that differs from a stored one in places.

Arms, alternating, each a streamed HTTP request to a random-weight Llama of about 100 M parameters:
    full           a prompt nobody has seen, straight to stock vLLM
    full_proxied   another such, through the proxy and the vLLM with the connector
    prefix_cache   the edited prompt straight to stock vLLM, which has served the donor
    shared         the edited prompt through the proxy, which has stored the donor; first edit near the top
    ideal          stock vLLM, all but as many last tokens as `shared` computed being in its prefix cache
    shared_even, ideal_even   the same two with the edits evenly spread
Above 8,000 tokens only full, shared and ideal, on a model of the same width with fewer layers. What the proxy
adds is measured apart, on repetitions that vLLM has in its prefix cache: `front_ms`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.bound import Bound, bound_of, copied_bytes_per_s
from kvshare.bench.figures import intervals
from kvshare.bench.harness import median
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Answer, Client, connected
from kvshare.bench.vllm.prompts import prefix_hit
from kvshare.bench.vllm.reports import Watch
from kvshare.bench.vllm.stack import EditedConfig, Stack, StackOptions, document, stack
from kvshare.fleet.client import ControlClient
from kvshare.vllm_protocol.messages import Finished

_ROOM = 128  # tokens of context beyond the prompt
_BLOCK_SIZE = 128  # of vLLM's CPU backend; a multiple of every other one's
_FRONT_REPEATS = 20
_LONG = 8000  # tokens, from which on the smaller model takes minutes, too
_PLACEMENTS = {"": False, "_even": True}  # endings of the arms' names, and whether edits are evenly spread


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    prompt_tokens: int = 4000
    repeats: int | None = None  # None: 7, or 3 of long prompts

    @property
    def is_long(self) -> bool:
        return self.prompt_tokens > _LONG

    @property
    def num_repeats(self) -> int:
        return self.repeats if self.repeats is not None else 3 if self.is_long else 7

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "repeats": self.num_repeats}


@dataclass(slots=True)
class Repeat:
    """One measurement of every arm."""

    ttft_s: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, Bound] = field(default_factory=dict)  # of the arms that share
    computed: dict[str, int] = field(default_factory=dict)  # tokens, by the arms that share
    prefix_cached: int = 0
    ideal_computed: dict[str, int] = field(default_factory=dict)
    stage_ms: dict[str, float] = field(default_factory=dict)
    unrelated_stage_ms: dict[str, float] = field(default_factory=dict)


def run(config: Config) -> dict[str, Any]:
    """Medians over the repeats, each of recipients that are new to all servers."""
    vllm = replace(config.vllm, max_model_len=config.prompt_tokens + _ROOM, kv_cache_gib=2)
    model = "long" if config.is_long else "timing"
    with stack(StackOptions(model, vllm=vllm, seed=config.seed)) as servers:
        return asyncio.run(measure(servers, config))


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """The same over servers that run already."""
    async with (
        servers.clients() as (plain, proxy),
        connected(servers.shared.url) as behind,
        servers.control() as control,
    ):
        rng = np.random.default_rng(config.seed)
        donor, block_size = config.stranger(rng), await reports.read_block_size(plain)
        bench = _Ttft(servers, config, plain, proxy, control, rng, donor, block_size)
        await bench.start()
        await bench.repeat()  # caches and allocators are warm from here on
        repeats = [await bench.repeat() for _ in range(config.num_repeats)]
        front = {} if config.is_long else {"front_ms": await bench.front_ms(behind)}
    return {
        **document("ttft", servers.options, config),
        **summary(repeats, config.prompt_tokens),
        **front,
        "decisions": bench.watch.decisions,
    }


@dataclass(slots=True)
class _Ttft:
    """A donor that both arms have served, and the measurements over it."""

    servers: Stack
    config: Config
    plain: Client
    proxy: Client
    control: ControlClient
    rng: np.random.Generator
    donor: TokenIds
    block_size: int  # of vLLM's prefix cache
    watch: Watch = field(default_factory=Watch)
    bytes_per_token: int = 0
    copied_bytes_per_s: float = 0.0

    async def start(self) -> None:
        await self.watch.look(self.control)
        self.watch.finished.clear()  # of whoever was before us
        self.bytes_per_token = (await self.control.info()).bytes_per_token
        self.copied_bytes_per_s = copied_bytes_per_s(len(self.servers.options.vllm.cores))
        await self.plain.complete(self.donor)
        await self._store(self.donor)

    async def repeat(self) -> Repeat:
        config, found = self.config, Repeat()
        full = await self.plain.complete(config.stranger(self.rng))
        found.ttft_s["full"] = full.ttft_s
        if config.is_long:
            await self._share(found, "", config.edited(self.rng, self.donor))
            return found
        proxied, found.unrelated_stage_ms = await self._store(config.stranger(self.rng))
        found.ttft_s["full_proxied"] = proxied.ttft_s
        for ending, is_even in _PLACEMENTS.items():
            edited = config.edited(self.rng, self.donor, is_even=is_even)
            if not is_even:
                cached = await self.plain.complete(edited)
                found.ttft_s["prefix_cache"], found.prefix_cached = cached.ttft_s, cached.num_cached
            await self._share(found, ending, edited)
        return found

    async def _share(self, found: Repeat, ending: str, edited: TokenIds) -> None:
        """`shared` and `ideal`: an edited prompt, and as many tokens behind an exact prefix."""
        shared, stages = await self._store(edited)
        finished = self.watch.finished[-1]
        prompt = prefix_hit(self.rng, self.donor, num_new=finished.num_computed, block_size=self.block_size)
        ideal = await self.plain.complete(prompt)
        found.ttft_s |= {f"shared{ending}": shared.ttft_s, f"ideal{ending}": ideal.ttft_s}
        found.computed[f"shared{ending}"] = finished.num_computed
        found.ideal_computed[f"shared{ending}"] = len(prompt) - ideal.num_cached
        found.bounds[f"shared{ending}"] = self._bound(finished)
        found.stage_ms = found.stage_ms or stages

    def _bound(self, finished: Finished) -> Bound:
        return bound_of(
            self.servers.options.model_config,
            finished,
            num_tokens=self.config.prompt_tokens,
            bytes_per_token=self.bytes_per_token,
            bytes_per_s=self.copied_bytes_per_s,
        )

    async def front_ms(self, behind: Client) -> float:
        """
        A repetition through the proxy less one straight to the vLLM `behind` it: median of pairs.

        The prompt ends one token behind a block, so that vLLM's own cache has all but that token either way,
        and the plan, which is made and sent, has nothing to add.
        """
        prompt = self.donor[: len(self.donor) // _BLOCK_SIZE * _BLOCK_SIZE + 1]
        added = []
        for _ in range(_FRONT_REPEATS + 1):
            straight = await behind.complete(prompt)
            through = await self.proxy.complete(prompt, extra={"kvshare": {"mode": "exact"}})
            added.append(through.ttft_s - straight.ttft_s)
        return 1e3 * median(added[1:])  # the first found no prefix in vLLM's own cache

    async def _store(self, prompt: TokenIds) -> tuple[Answer, dict[str, float]]:
        """A request through the proxy, its milliseconds per stage, and the wait until its KV is stored."""
        before = await reports.read_counters(self.proxy)
        num_nodes = (await reports.read_stats(self.proxy))["num_nodes"]
        answer = await self.proxy.complete(prompt)
        await reports.wait_stats(self.proxy, lambda stats: stats["num_nodes"] > num_nodes)
        await self.watch.look(self.control)
        inside = {
            f"vllm_{stage}": 1e3 * value for stage, value in self.watch.finished[-1].stage_seconds.items()
        }
        counted = (await reports.read_counters(self.proxy)).since(before)
        return answer, {**counted.stage_ms, **inside}


def summary(repeats: Sequence[Repeat], num_tokens: int) -> dict[str, Any]:
    """
    Ratios of the arms' median times, with intervals over the repeats' own ratios.

    `speedup`: full over shared. `of_ideal`: ideal over shared. `of_bound`: the bound's seconds over shared,
    which is speedup / (full / bound). Tokens and bytes are medians.
    """
    ttft_s = {name: [repeat.ttft_s[name] for repeat in repeats] for name in repeats[0].ttft_s}
    ttft = {name: median(values) for name, values in ttft_s.items()}
    found: dict[str, Any] = {
        **_shared(repeats, ttft, "", num_tokens),
        "median_ttft_s": ttft,
        "ttft_s": ttft_s,
        "spread": {name: (max(values) - min(values)) / ttft[name] for name, values in ttft_s.items()},
        "shared_stage_ms": _median_stages([repeat.stage_ms for repeat in repeats]),
    }
    if "full_proxied" not in ttft:
        return found
    found["tokens"]["prefix_cached"] = median([repeat.prefix_cached for repeat in repeats])
    return {
        **found,
        "even": _shared(repeats, ttft, "_even", num_tokens),
        "prefix_cache_speedup": ttft["full"] / ttft["prefix_cache"],
        "unrelated_loss": ttft["full_proxied"] / ttft["full"] - 1,
        "speedup_over_proxied": ttft["full_proxied"] / ttft["shared"],
        "unrelated_stage_ms": _median_stages([repeat.unrelated_stage_ms for repeat in repeats]),
    }


def _shared(
    repeats: Sequence[Repeat], ttft: Mapping[str, float], ending: str, num_tokens: int
) -> dict[str, Any]:
    """Of one placement of the edits."""
    shared, ideal = f"shared{ending}", f"ideal{ending}"
    bounds = [repeat.bounds[shared] for repeat in repeats]
    bound_s = median([bound.seconds(ttft["full"]) for bound in bounds])
    computed = median([repeat.computed[shared] for repeat in repeats])
    each = [_ratios(repeat, shared, ideal) for repeat in repeats]
    return {
        "speedup": ttft["full"] / ttft[shared],
        "ideal_speedup": ttft["full"] / ttft[ideal],
        "of_ideal": ttft[ideal] / ttft[shared],
        "of_bound": bound_s / ttft[shared],
        "intervals": intervals({name: [ratios[name] for ratios in each] for name in each[0]}),
        "bound": {
            "speedup": ttft["full"] / bound_s,
            "seconds": bound_s,
            "flop_share": median([bound.flop_share for bound in bounds]),
            "bytes": median([bound.num_bytes for bound in bounds]),
            "copied_bytes_per_s": bounds[0].copied_bytes_per_s,
        },
        "tokens": {
            "computed": computed,
            "computed_fraction": computed / num_tokens,
            "ideal_computed": median([repeat.ideal_computed[shared] for repeat in repeats]),
        },
    }


def _ratios(repeat: Repeat, shared: str, ideal: str) -> dict[str, float]:
    ttft = repeat.ttft_s
    return {
        "speedup": ttft["full"] / ttft[shared],
        "of_ideal": ttft[ideal] / ttft[shared],
        "of_bound": repeat.bounds[shared].seconds(ttft["full"]) / ttft[shared],
    }


def _median_stages(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    return {name: median([row[name] for row in rows if name in row]) for name in sorted(names)}
