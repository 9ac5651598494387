"""
`kvshare bench burst --engine vllm`: near-duplicates that arrive at once, with nothing stored.

Arms and times as in `kvshare.bench.burst`, over real sockets: `burst` and `warm` through the proxy, `full` to
stock vLLM with its prefix cache. Answers go on after the first token, so prompts are copied from one whose
answer is still being generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from delta_tree import TokenIds
from kvshare.bench.burst import Served, compare
from kvshare.bench.vllm.session import run_benchmark, session
from kvshare.bench.vllm.stack import EditedConfig, Stack, stack


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    concurrency: int = 8
    max_tokens: int = 16
    repeats: int = 3


def run(config: Config) -> dict[str, Any]:
    """Figures over `repeats` bursts."""
    return run_benchmark("burst", config, measure, stack)


async def measure(servers: Stack, config: Config) -> dict[str, Any]:
    """The same over servers that run already, without the head of the document."""
    async with session(servers, config) as bench:

        def prompts() -> list[TokenIds]:
            base = bench.unrelated()
            return [bench.edited(base) for _ in range(config.concurrency)]

        async def serve(arm: str, prompt: TokenIds) -> Served:
            client = bench.plain if arm == "full" else bench.proxy
            answer = await client.complete(prompt, max_tokens=config.max_tokens)
            return Served(answer.ttft_s, answer.num_cached / len(prompt))

        return await compare(prompts, serve, bench.settle, repeats=config.repeats)
