"""
The number of tokens from which sharing pays: time to the first token of edited prompts of growing length,
shared and in full by stock vLLM; and what the proxy concludes from the rates that it measures meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kvshare.bench.harness import alternate, median
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.client import Answer
from kvshare.bench.vllm.session import Session, session
from kvshare.bench.vllm.stack import EditedConfig, Stack
from kvshare.sharing.cost import Rates

_SHORTEST = 128  # tokens


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    repeats: int = 3

    @property
    def lengths(self) -> list[int]:
        """Doubling up to `prompt_tokens`, which is the last."""
        shorter = [_SHORTEST << power for power in range(16) if _SHORTEST << power < self.prompt_tokens]
        return [*shorter, self.prompt_tokens]


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """The proxy must share whether it pays or not."""
    async with session(servers, config) as bench:
        rows = [await _row(bench, length) for length in config.lengths]
        costs = await reports.read_stats(bench.proxy, "costs")
    return {"measured_tokens": first_that_pays(rows), "lengths": rows, **learned(costs, config.changed)}


async def _row(bench: Session[Config], length: int) -> dict[str, Any]:
    """Medians at one length."""
    config = replace(bench.config, prompt_tokens=length)
    donor = config.unrelated(bench.rng)
    await bench.proxy.complete(donor)
    await bench.settle()

    async def ask(arm: str) -> Answer:
        if arm == "full":
            return await bench.plain.complete(config.unrelated(bench.rng))
        answer = await bench.proxy.complete(bench.edited(donor))
        await bench.settle()
        return answer

    answers = await alternate(("full", "shared"), config.repeats, ask)
    ttft_s = {arm: median([answer.ttft_s for answer in own]) for arm, own in answers.items()}
    return {
        "tokens": length,
        "full_ttft_s": ttft_s["full"],
        "shared_ttft_s": ttft_s["shared"],
        "speedup": ttft_s["full"] / ttft_s["shared"],
        "reused": median([answer.num_cached / length for answer in answers["shared"]]),
    }


def first_that_pays(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The shortest length from which on all were faster when shared; None if the longest was not."""
    found = None
    for row in reversed(rows):
        if row["speedup"] <= 1:
            break
        found = int(row["tokens"])
    return found


def learned(costs: Mapping[str, Any], changed: float) -> dict[str, Any]:
    """The length from which plans save time, by the proxy's rates; None unless all rates were measured."""
    rates = Rates(**{field.name: costs[field.name] for field in fields(Rates)})
    is_known = len(costs["measured"]) == 2
    tokens = rates.break_even(computed=changed, min_saved_s=0.0) if is_known else None
    return {"learned_tokens": tokens, "costs": dict(costs)}
