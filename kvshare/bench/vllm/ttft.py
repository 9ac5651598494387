"""
`kvshare bench ttft --engine vllm`: time to first token of a prompt that differs from a stored one in places.

Arms, alternating, each a streamed HTTP request to a random-weight Llama of about 100 M parameters:
    full           a prompt nobody has seen, straight to stock vLLM
    full_proxied   another such, through the proxy and the vLLM with the connector
    prefix_cache   the edited prompt straight to stock vLLM, which has served the donor
    shared         the edited prompt through the proxy, which has kept the donor
    ideal          stock vLLM, all but as many last tokens as `shared` computed being in its prefix cache
What the proxy adds is measured apart, on repetitions that vLLM has in its prefix cache: `front_ms`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare.bench.harness import median
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Answer, Client, connected
from kvshare.bench.vllm.prompts import stranger
from kvshare.bench.vllm.reports import Watch
from kvshare.bench.vllm.stack import EditedConfig, Stack, StackOptions, document, stack
from kvshare.fleet.client import ControlClient

_ARMS = ("full", "full_proxied", "prefix_cache", "shared", "ideal")
_ROOM = 128  # tokens of context beyond the prompt
_BLOCK_SIZE = 128  # of vLLM's CPU backend; a multiple of every other one's
_FRONT_REPEATS = 20


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    prompt_tokens: int = 4000
    repeats: int = 3


@dataclass(frozen=True, slots=True)
class _Repeat:
    """One measurement of every arm."""

    ttft_s: dict[str, float]
    computed: int  # tokens, by `shared`
    prefix_cached: int
    ideal_computed: int
    stage_ms: dict[str, float]
    unrelated_stage_ms: dict[str, float]


def run(config: Config) -> dict[str, Any]:
    """Medians over `repeats` recipients, each new to all servers."""
    vllm = replace(config.vllm, max_model_len=config.prompt_tokens + _ROOM, kv_cache_gib=2)
    with stack(StackOptions(vllm=vllm, seed=config.seed)) as servers:
        return asyncio.run(measure(servers, config))


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """The same over servers that run already."""
    async with (
        servers.clients() as (plain, proxy),
        connected(servers.shared.url) as behind,
        servers.control() as control,
    ):
        rng = np.random.default_rng(config.seed)
        donor, block_size = config.stranger(rng), await _block_size(plain)
        bench = _Ttft(config, plain, proxy, control, rng, donor, block_size)
        await bench.start()
        await bench.repeat()  # caches and allocators are warm from here on
        repeats = [await bench.repeat() for _ in range(config.repeats)]
        front_ms = await bench.front_ms(behind)
    return _summary(servers, config, repeats, front_ms=front_ms, decisions=bench.watch.decisions)


@dataclass(slots=True)
class _Ttft:
    """A donor that both arms have served, and the measurements over it."""

    config: Config
    plain: Client
    proxy: Client
    control: ControlClient
    rng: np.random.Generator
    donor: TokenIds
    block_size: int  # of vLLM's prefix cache
    watch: Watch = field(default_factory=Watch)

    async def start(self) -> None:
        await self.watch.look(self.control)
        self.watch.finished.clear()  # of whoever was before us
        await self.plain.complete(self.donor)
        await self._keep(self.donor)

    async def repeat(self) -> _Repeat:
        config, rng = self.config, self.rng
        edited = config.edited(rng, self.donor)
        full = await self.plain.complete(config.stranger(rng))
        proxied, unrelated_stages = await self._keep(config.stranger(rng))
        cached = await self.plain.complete(edited)
        shared, stages = await self._keep(edited)
        computed = self.watch.finished[-1].num_computed
        # vLLM's prefix cache holds whole blocks: cut the donor at one, and add what is to be computed.
        head = round((config.prompt_tokens - computed) / self.block_size) * self.block_size
        ideal = await self.plain.complete(
            token_ids(np.concatenate([self.donor[:head], stranger(rng, computed)]))
        )
        answers = zip(_ARMS, (full, proxied, cached, shared, ideal), strict=True)
        return _Repeat(
            ttft_s={name: answer.ttft_s for name, answer in answers},
            computed=computed,
            prefix_cached=cached.num_cached,
            ideal_computed=head + computed - ideal.num_cached,
            stage_ms=stages,
            unrelated_stage_ms=unrelated_stages,
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

    async def _keep(self, prompt: TokenIds) -> tuple[Answer, dict[str, float]]:
        """A request through the proxy, its milliseconds per stage, and the wait until its KV is kept."""
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


async def _block_size(plain: Client) -> int:
    sizes = (await reports.read_counters(plain)).by("vllm:cache_config_info", "block_size")
    return int(next(iter(sizes)))


def _summary(
    servers: Stack, config: Config, repeats: list[_Repeat], *, front_ms: float, decisions: dict[str, int]
) -> dict[str, Any]:
    ttft_s = {name: [repeat.ttft_s[name] for repeat in repeats] for name in _ARMS}
    ttft = {name: median(values) for name, values in ttft_s.items()}
    computed = median([repeat.computed for repeat in repeats])
    return {
        **document("ttft", servers.options, config),
        "speedup": ttft["full"] / ttft["shared"],
        "ideal_speedup": ttft["full"] / ttft["ideal"],
        "of_ideal": ttft["ideal"] / ttft["shared"],
        "prefix_cache_speedup": ttft["full"] / ttft["prefix_cache"],
        "unrelated_loss": ttft["full_proxied"] / ttft["full"] - 1,
        "speedup_over_proxied": ttft["full_proxied"] / ttft["shared"],
        "front_ms": front_ms,
        "tokens": {
            "computed": computed,
            "computed_fraction": computed / config.prompt_tokens,
            "prefix_cached": median([repeat.prefix_cached for repeat in repeats]),
            "ideal_computed": median([repeat.ideal_computed for repeat in repeats]),
        },
        "decisions": decisions,
        "median_ttft_s": ttft,
        "ttft_s": ttft_s,
        "spread": {name: (max(values) - min(values)) / ttft[name] for name, values in ttft_s.items()},
        "shared_stage_ms": _median_stages([repeat.stage_ms for repeat in repeats]),
        "unrelated_stage_ms": _median_stages([repeat.unrelated_stage_ms for repeat in repeats]),
    }


def _median_stages(rows: list[dict[str, float]]) -> dict[str, float]:
    names = {name for row in rows for name in row}
    return {name: median([row[name] for row in rows if name in row]) for name in sorted(names)}
