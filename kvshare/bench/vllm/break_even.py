"""
From how many tokens on sharing pays: time to the first token of edited prompts of growing length, shared and
in full by stock vLLM, and what the proxy concludes from the rates that it has measured meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kvshare.bench.harness import median
from kvshare.bench.vllm import reports
from kvshare.bench.vllm.prompts import near_duplicate, stranger
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
    """Of a proxy that shares whether it pays or not."""
    rng = np.random.default_rng(config.seed)
    rows = []
    async with servers.clients() as (plain, proxy):
        for length in config.lengths:
            donor = stranger(rng, length)
            await proxy.complete(donor)
            await reports.settle(proxy)
            full, shared, cached = [], [], []
            for repeat in range(config.repeats + 1):
                edited = near_duplicate(rng, donor, changed=config.changed, edits=config.edits)
                answer = await proxy.complete(edited)
                await reports.settle(proxy)
                other = await plain.complete(stranger(rng, length))
                if repeat:  # the first warms up
                    full.append(other.ttft_s)
                    shared.append(answer.ttft_s)
                    cached.append(answer.num_cached / length)
            rows.append(
                {
                    "tokens": length,
                    "full_ttft_s": median(full),
                    "shared_ttft_s": median(shared),
                    "speedup": median(full) / median(shared),
                    "reused": median(cached),
                }
            )
        costs = await reports.read_costs(proxy)
    return {"measured_tokens": first_that_pays(rows), "lengths": rows, **learned(costs, config.changed)}


def first_that_pays(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The shortest length from which on every one was faster shared; None if the longest was not."""
    found = None
    for row in reversed(rows):
        if row["speedup"] <= 1:
            break
        found = int(row["tokens"])
    return found


def learned(costs: Mapping[str, Any], changed: float) -> dict[str, Any]:
    """What the proxy's rates say, for plans that save any time; null where they were not measured."""
    rates = Rates(**{field.name: costs[field.name] for field in fields(Rates)})
    is_known = len(costs["measured"]) == 2
    tokens = rates.break_even(computed=changed, min_saved_s=0.0) if is_known else None
    return {"learned_tokens": tokens, "costs": dict(costs)}
