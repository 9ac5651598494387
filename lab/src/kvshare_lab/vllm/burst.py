"""
`kvshare bench burst --engine vllm`: near-duplicates that arrive at once, with nothing stored.

Arms and times as in `kvshare_lab.bench.burst`, over real sockets: `burst` and `warm` through the proxy,
`full` to stock vLLM with its prefix cache. Answers go on after the first token, so prompts are copied from
one whose answer is still being generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from delta_tree import TokenIds
from kvshare_lab.bench.burst import Served, compare
from kvshare_lab.vllm.session import Session, run_benchmark
from kvshare_lab.vllm.stack import EditedConfig


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    concurrency: int = 8
    max_tokens: int = 16
    repeats: int = 7


async def measure(bench: Session[Config]) -> dict[str, Any]:
    """Figures over `repeats` bursts."""

    def prompts() -> list[TokenIds]:
        base = bench.unrelated()
        return [bench.edited(base) for _ in range(bench.config.concurrency)]

    async def serve(arm: str, prompt: TokenIds) -> Served:
        client = bench.plain if arm == "full" else bench.proxy
        answer = await client.complete(prompt, max_tokens=bench.config.max_tokens)
        return Served(answer.ttft_s, answer.num_cached / len(prompt))

    return await compare(prompts, serve, bench.settle, repeats=bench.config.repeats)


run = partial(run_benchmark, "burst", measure)
