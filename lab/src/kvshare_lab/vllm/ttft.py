"""
`kvshare bench ttft --engine vllm`: time to first token of a prompt that differs from a stored one in places.

Arms, in turns, each a streamed HTTP request to a random-weight Llama of about 100 M parameters, or `--model`:
    full           an unrelated prompt, straight to stock vLLM
    full_proxied   another, through the proxy and the vLLM with the connector
    prefix_cache   the edited prompt straight to stock vLLM, which has served the donor
    shared         the edited prompt through the proxy, which has stored the donor; first edit near the top
    ideal          an equal-compute prefix hit: stock vLLM, where all but as many last tokens as `shared`
                   computed are in the prefix cache (the key is older than the name)
    shared_even, ideal_even   the same two with the edits evenly spread
Above 8,000 tokens only full, shared and ideal are measured, by default on a model with fewer layers.
What the proxy adds is measured separately, on repetitions that vLLM has in its prefix cache: `front_ms`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

from delta_tree import TokenIds
from kvshare.vllm_protocol.messages import FinishedReport
from kvshare_lab.bench.bound import Bound, bound_figures, computed_spans, copied_bytes_per_s
from kvshare_lab.bench.figures import by_name, intervals
from kvshare_lab.bench.harness import median
from kvshare_lab.vllm.client import Answer, Client
from kvshare_lab.vllm.prompts import prefix_hit
from kvshare_lab.vllm.session import Session, run_benchmark
from kvshare_lab.vllm.stack import EditedConfig

_EQUAL_COMPUTE = "ideal"  # the arm's key, without its ending
_BLOCK_SIZE = 128  # of vLLM's CPU backend; a multiple of every other one's
_FRONT_REPEATS = 20
_LONG = 8000  # tokens, above which even the smaller model takes minutes
_PLACEMENTS = {"": False, "_even": True}  # endings of the arms' names, and whether edits are evenly spread


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    prompt_tokens: int = 4000
    repeats: int | None = None  # None: 7, or 3 of long prompts

    @property
    def own_model(self) -> str:
        return "long" if self.is_long else "timing"

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
    """One measurement of every arm. `ttft_s` is by arm, the next three by the arms that share."""

    ttft_s: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, Bound] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)  # tokens
    equal_computed: dict[str, int] = field(default_factory=dict)  # tokens, by the equal-compute prefix hit
    prefix_cached: int = 0
    stage_ms: dict[str, float] = field(default_factory=dict)
    unrelated_stage_ms: dict[str, float] = field(default_factory=dict)

    def ratios(self, ending: str) -> dict[str, float]:
        shared, full = f"shared{ending}", self.ttft_s["full"]
        return {
            **ratios(self.ttft_s, ending),
            "of_bound": self.bounds[shared].seconds(full) / self.ttft_s[shared],
        }


async def measure(bench: Session[Config]) -> dict[str, Any]:
    """Medians over the repeats, each of recipients that are new to all servers."""
    donor = bench.unrelated()
    arms = await _Arms.of(bench, donor)
    await bench.begin([donor])
    await arms.repeat()  # caches and allocators are warm from here on
    repeats = [await arms.repeat() for _ in range(bench.config.num_repeats)]
    front = {} if bench.config.is_long else {"front_ms": await _front_ms(bench, donor)}
    return {**summary(repeats, len(donor)), **front, "decisions": bench.watch.decisions}


@dataclass(frozen=True, slots=True)
class _Arms:
    """All arms over one donor. `bound`: makes a `Bound` for these servers."""

    bench: Session[Config]
    donor: TokenIds
    block_size: int
    bound: Callable[..., Bound]

    @classmethod
    async def of(cls, bench: Session[Config], donor: TokenIds) -> Self:
        block_size, info = await bench.plain.block_size(), await bench.control.info()
        options = bench.servers.options
        bytes_per_s = copied_bytes_per_s(len(options.vllm.cores))
        bound = partial(
            Bound.of, options.model_size, bytes_per_token=info.bytes_per_token, bytes_per_s=bytes_per_s
        )
        return cls(bench, donor, block_size, bound)

    async def repeat(self) -> Repeat:
        bench, donor = self.bench, self.donor
        found = Repeat({"full": (await _alone(bench, bench.plain, bench.unrelated())).ttft_s})
        if bench.config.is_long:
            await self._share(found, "", bench.edited(donor))
            return found
        proxied, _, found.unrelated_stage_ms = await _store(bench, bench.unrelated())
        found.ttft_s["full_proxied"] = proxied.ttft_s
        for ending, is_even in _PLACEMENTS.items():
            edited = bench.edited(donor, is_even=is_even)
            if not is_even:
                cached = await _alone(bench, bench.plain, edited)
                found.ttft_s["prefix_cache"], found.prefix_cached = cached.ttft_s, cached.num_cached
            await self._share(found, ending, edited)
        return found

    async def _share(self, found: Repeat, ending: str, edited: TokenIds) -> None:
        """An edited prompt, and the prefix hit that computes as many tokens."""
        bench, name = self.bench, f"shared{ending}"
        shared, finished, stages = await _store(bench, edited)
        computed = finished.num_computed
        prompt = prefix_hit(bench.rng, self.donor, num_new=computed, block_size=self.block_size)
        equal_compute = await _alone(bench, bench.plain, prompt)
        found.ttft_s |= {name: shared.ttft_s, f"{_EQUAL_COMPUTE}{ending}": equal_compute.ttft_s}
        found.computed[name] = computed
        found.equal_computed[name] = len(prompt) - equal_compute.num_cached
        num_copied = len(edited) - computed - finished.num_local
        spans = computed_spans(finished)
        found.bounds[name] = self.bound(spans, num_tokens=len(edited), num_copied=num_copied)
        found.stage_ms = found.stage_ms or stages


async def _front_ms(bench: Session[Config], donor: TokenIds) -> float:
    """
    Milliseconds that a repetition through the proxy takes more than one straight to the vLLM behind it.

    The prompt ends one token after a block, so that vLLM's own cache has all but that token either way, and
    the plan, which is made and sent, has nothing to add. The median of pairs.
    """
    prompt = donor[: len(donor) // _BLOCK_SIZE * _BLOCK_SIZE + 1]
    added = []
    for _ in range(_FRONT_REPEATS + 1):
        straight = await bench.shared.complete(prompt)
        through = await bench.proxy.complete(prompt, extra={"kvshare": {"mode": "exact"}})
        added.append(through.ttft_s - straight.ttft_s)
    return 1e3 * median(added[1:])  # the first found no prefix in vLLM's own cache


async def _alone(bench: Session[Config], client: Client, prompt: TokenIds) -> Answer:
    """A request while no other server is at work."""
    await bench.settle()
    return await client.complete(prompt)


async def _store(bench: Session[Config], prompt: TokenIds) -> tuple[Answer, FinishedReport, dict[str, float]]:
    """While no other server is at work, see `Session.store`."""
    await bench.settle()
    return await bench.store(prompt)


def summary(repeats: Sequence[Repeat], num_tokens: int) -> dict[str, Any]:
    """
    Ratios of the arms' median times, with intervals of the repeats' own ratios. Tokens and bytes are medians.

    `speedup`: full over shared. `of_bound`: the bound's seconds over shared. `of_equal_compute`: the prefix
    hit that computes as much, over shared.
    """
    ttft_s = by_name([repeat.ttft_s for repeat in repeats])
    ttft = {name: median(values) for name, values in ttft_s.items()}
    found: dict[str, Any] = {
        **_placement(repeats, ttft, "", num_tokens),
        "median_ttft_s": ttft,
        "ttft_s": ttft_s,
        "spread": {name: (max(values) - min(values)) / ttft[name] for name, values in ttft_s.items()},
        "shared_stage_ms": _medians([repeat.stage_ms for repeat in repeats]),
    }
    if "full_proxied" not in ttft:
        return found
    found["tokens"]["prefix_cached"] = median([repeat.prefix_cached for repeat in repeats])
    return {
        **found,
        "even": _placement(repeats, ttft, "_even", num_tokens),
        "prefix_cache_speedup": ttft["full"] / ttft["prefix_cache"],
        "unrelated_loss": ttft["full_proxied"] / ttft["full"] - 1,
        "speedup_over_proxied": ttft["full_proxied"] / ttft["shared"],
        "unrelated_stage_ms": _medians([repeat.unrelated_stage_ms for repeat in repeats]),
    }


def _placement(
    repeats: Sequence[Repeat], ttft: Mapping[str, float], ending: str, num_tokens: int
) -> dict[str, Any]:
    """Of one placement of the edits; `ttft` has the medians."""
    shared = f"shared{ending}"
    bounds = [repeat.bounds[shared] for repeat in repeats]
    computed = median([repeat.computed[shared] for repeat in repeats])
    equal_computed = median([repeat.equal_computed[shared] for repeat in repeats])
    equal_compute_speedup = ttft["full"] / ttft[_EQUAL_COMPUTE + ending]
    return {
        **ratios(ttft, ending),
        **bound_figures(bounds, full_s=ttft["full"], shared_s=ttft[shared]),
        "equal_compute_speedup": equal_compute_speedup,
        "ideal_speedup": equal_compute_speedup,  # its older name
        "intervals": intervals(by_name([repeat.ratios(ending) for repeat in repeats])),
        "tokens": {
            "computed": computed,
            "computed_fraction": computed / num_tokens,
            "equal_computed": equal_computed,
            "ideal_computed": equal_computed,  # its older name
        },
    }


def ratios(ttft: Mapping[str, float], ending: str) -> dict[str, float]:
    shared = ttft[f"shared{ending}"]
    of_equal_compute = ttft[_EQUAL_COMPUTE + ending] / shared
    return {
        "speedup": ttft["full"] / shared,
        "of_equal_compute": of_equal_compute,
        "of_ideal": of_equal_compute,  # its older name
    }


def _medians(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: median(values) for name, values in sorted(by_name(rows).items())}


run = partial(run_benchmark, "ttft", measure)
