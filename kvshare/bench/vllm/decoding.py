"""
Time between the tokens of streams that decode while other requests arrive, one after the other:

    quiet   nothing else
    full    unrelated prompts, without sharing
    saves   unrelated prompts through the proxy: their KV is saved
    loads   near-duplicates of a stored prompt: KV is loaded, the rest computed and saved
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from kvshare.bench.figures import percentiles
from kvshare.bench.harness import alternate
from kvshare.bench.vllm.client import connected
from kvshare.bench.vllm.prompts import unrelated_prompt
from kvshare.bench.vllm.session import session
from kvshare.bench.vllm.stack import EditedConfig, Stack

ARMS = ("quiet", "full", "saves", "loads")
STREAM_PROMPT = 32  # tokens: short, as their prefill is not measured


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    streams: int = 8
    output_tokens: int = 128
    repeats: int = 3


class Decoded(NamedTuple):
    """One round: seconds between the tokens of all streams, and how many requests arrived meanwhile."""

    gaps_s: list[float]
    num_arrived: int


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """Percentiles of each arm, and ratios over those of `quiet`."""
    async with session(servers, config) as bench, connected(servers.shared.url) as straight:
        donor = bench.unrelated()
        await bench.proxy.complete(donor)
        await bench.settle()
        arrivals = {
            "full": lambda: straight.complete(bench.unrelated()),
            "saves": lambda: bench.proxy.complete(bench.unrelated()),
            "loads": lambda: bench.proxy.complete(bench.edited(donor)),
        }

        async def decode(arm: str) -> Decoded:
            prompts = [unrelated_prompt(bench.rng, STREAM_PROMPT) for _ in range(config.streams)]
            decoding = asyncio.gather(
                *(straight.complete(prompt, max_tokens=config.output_tokens) for prompt in prompts)
            )
            number = 0
            while arm in arrivals and not decoding.done():
                await arrivals[arm]()
                number += 1
            answers = await decoding
            await bench.settle()
            return Decoded([gap for answer in answers for gap in answer.gaps_s], number)

        return summary(await alternate(ARMS, config.repeats, decode))


def summary(rounds: dict[str, list[Decoded]]) -> dict[str, Any]:
    """Of all gaps of each arm, and each arm over `quiet`."""
    gaps = {arm: [gap for decoded in own for gap in decoded.gaps_s] for arm, own in rounds.items()}
    # Where the client reads late, several tokens come at once: the mean does not depend on that.
    arms = {arm: {"mean_ms": 1e3 * fmean(own), **percentiles(own)} for arm, own in gaps.items()}
    ratios = {
        f"{figure}_ratio": {
            arm: arms[arm][f"{figure}_ms"] / arms["quiet"][f"{figure}_ms"] for arm in ARMS[1:]
        }
        for figure in ("mean", "p99", "max")
    }
    arrived = {arm: sum(decoded.num_arrived for decoded in own) for arm, own in rounds.items()}
    return {**ratios, "arms": arms, "arrivals": arrived}
