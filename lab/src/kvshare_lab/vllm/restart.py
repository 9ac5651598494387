"""
`kvshare bench restart --engine vllm`: time to first token of prompts whose donors an earlier vLLM left on
disk.

vLLM and the proxy serve donors and are stopped. Others start on the same folders; what the kernel has cached
of the files is given back first, so that they are read from the disk. The arms, through the proxy:
    full      an unrelated prompt
    exact     a donor, and a few new tokens after it: all of the donor is read from disk
    edited    a near-duplicate of another donor, which is read from disk
    memory    the same donor as for `edited`, edited in other places: its KV is in memory now
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.errors import EngineError
from kvshare_lab.bench.figures import by_name, drop_from_page_cache
from kvshare_lab.bench.harness import median
from kvshare_lab.bench.random_models import write_model
from kvshare_lab.vllm import servers
from kvshare_lab.vllm.prompts import unrelated_prompt
from kvshare_lab.vllm.session import Session, session
from kvshare_lab.vllm.stack import ALWAYS_SHARE, EditedConfig, Stack, StackOptions, document

_ARMS = ("full", "exact", "edited", "memory")
_NEW_TOKENS = 32  # after an exact prefix
_WRITTEN_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Config(EditedConfig):
    prompt_tokens: int = 4000
    changed: float = 0.05
    repeats: int = 3

    @property
    def longest(self) -> int:
        return self.prompt_tokens + _NEW_TOKENS


def run(config: Config) -> dict[str, Any]:
    """The whole document. Raises EngineError."""
    options = config.options
    with tempfile.TemporaryDirectory(prefix="kvshare-bench-") as name:
        folder = Path(name)
        stack = _stack(options, folder)
        donors = _donors(config)
        with servers.running([stack.shared]), servers.running([stack.proxy]):
            asyncio.run(_store(stack, config, donors))
        drop_from_page_cache(folder / "kv")
        with servers.running([stack.shared]), servers.running([stack.proxy]):
            found = asyncio.run(_measure(stack, config, donors))
    return {**document("restart", options, config), **found}


def _stack(options: StackOptions, folder: Path) -> Stack:
    """Without a stock vLLM: everything is asked through the proxy."""
    vllm, model, token = options.vllm, options.model, servers.new_token()
    if options.has_random_weights:
        length, own = vllm.max_model_len, folder / "model"
        model = str(write_model(model, own, dtype=vllm.dtype, max_model_len=length, seed=options.seed))
    shared = servers.shared_vllm(
        model, folder, vllm, kv_bytes=options.kv_bytes, token=token, disk=folder / "kv"
    )
    # Plans are made whether they pay here or not, so that a slow one is seen.
    proxy = servers.proxy(shared, folder, token=token, settings=ALWAYS_SHARE)
    return Stack(options, plain=shared, shared=shared, proxy=proxy, token=token)


def _donors(config: Config) -> list[TokenIds]:
    """Two for each repeat, and for one that warms."""
    rng = np.random.default_rng(config.seed)
    return [unrelated_prompt(rng, config.prompt_tokens) for _ in range(2 * (config.repeats + 1))]


async def _store(stack: Stack, config: Config, donors: Sequence[TokenIds]) -> None:
    async with session(stack, config) as bench:
        for donor in donors:
            await bench.proxy.complete(donor)
        await bench.settle()
        deadline = time.monotonic() + _WRITTEN_S
        while (info := await bench.control.info()).num_disk_segments < info.num_segments:
            if time.monotonic() > deadline:
                raise EngineError(f"{info.num_segments - info.num_disk_segments} segments were not written")
            await asyncio.sleep(0.2)
            await bench.shared.complete(donors[0][:8])  # what was written is reported with a step


async def _measure(stack: Stack, config: Config, donors: Sequence[TokenIds]) -> dict[str, Any]:
    async with AsyncExitStack() as opened:
        bench = await opened.enter_async_context(session(stack, config))
        bench.rng = np.random.default_rng(config.seed + 1)
        await bench.settle()
        info = await bench.control.info()
        rows = [
            await _asked(bench, donors[2 * number], donors[2 * number + 1])
            for number in range(config.repeats + 1)
        ]
        costs = await bench.stats("costs")
    ttft_s = by_name([{arm: row[arm] for arm in _ARMS} for row in rows[1:]])  # after the first all is warm
    ttft = {arm: median(values) for arm, values in ttft_s.items()}
    return {
        "exact_speedup": ttft["full"] / ttft["exact"],
        "edited_speedup": ttft["full"] / ttft["edited"],
        "memory_speedup": ttft["full"] / ttft["memory"],
        "median_ttft_s": ttft,
        "ttft_s": ttft_s,
        "read_s": {arm: median([row[f"{arm}_read_s"] for row in rows[1:]]) for arm in ("exact", "edited")},
        "read_bytes": {arm: rows[-1][f"{arm}_read_bytes"] for arm in ("exact", "edited", "memory")},
        "computed": {arm: rows[-1][f"{arm}_computed"] for arm in ("exact", "edited")},
        "segments_found": info.num_segments,
        "disk_bytes_per_s": costs["loads"]["disk"]["bytes_per_s"],
    }


async def _asked(bench: Session[Config], exact: TokenIds, edited: TokenIds) -> dict[str, float]:
    """One prompt of each arm."""
    longer = np.concatenate([exact, unrelated_prompt(bench.rng, _NEW_TOKENS)])
    prompts = {
        "full": bench.unrelated(),
        "exact": longer,
        "edited": bench.edited(edited),
        "memory": bench.edited(edited),
    }
    found: dict[str, float] = {}
    for arm, prompt in prompts.items():
        await bench.settle()
        mode = "exact" if arm == "exact" else "approx"
        answer = await bench.proxy.complete(prompt, extra={"kvshare": {"mode": mode}})
        await bench.settle()
        finished = (await bench.watch.look())[-1]
        found[arm] = answer.ttft_s
        found[f"{arm}_read_s"] = finished.stage_seconds.get("disk", 0.0)
        found[f"{arm}_read_bytes"] = finished.disk_bytes
        found[f"{arm}_computed"] = finished.num_computed
    return found
