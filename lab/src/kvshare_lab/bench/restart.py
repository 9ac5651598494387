"""
`kvshare bench restart`: time to first token of edited prompts whose donors an earlier process has stored.

An engine stores prompts and stops. Another one starts on the same store; what the kernel has cached of the KV
is given back first, so that it is read from the disk. The arms, for each recipient of a donor of its own:
    full      nothing is shared
    disk      the donor's KV is on disk
    memory    the same prompt again: the KV is in memory now
With `objects`: how long starts take with so many small objects on disk, see `disk_starts.py`.
With `break_even`: the same on a disk that is slower than computing, see `throttled.py`.
"""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.requests import SharingMode
from kvshare.served_model import DEFAULT
from kvshare.tiers import KV_FOLDER
from kvshare_lab.bench import disk_starts
from kvshare_lab.bench.figures import drop_from_page_cache
from kvshare_lab.bench.harness import Answer, ask, bench_settings, edited, environment, median, random_prompt
from kvshare_lab.bench.throttled import measured

_ARMS = ("full", "disk", "memory")
_NUM_ANSWER = 16  # tokens whose text is compared


async def run(
    *,
    prompt_tokens: int = 2000,
    changed: float = 0.05,
    edits: int = 5,
    repeats: int = 5,
    seed: int = 0,
    model: str | None = None,
    objects: int = 0,
    break_even: float = 0.0,
) -> dict[str, Any]:
    """
    Medians over `repeats` recipients. `model`: what `model.path` may be; None: the default chat model.
    `break_even`: as many more on a disk that is held back to this share of it, see `throttled.py`; 0: none.

    Raises:  ModelError
    """
    found: dict[str, Any] = {}
    if objects:
        found = {**disk_starts.of_embedded(objects), "vllm": disk_starts.of_vllm(objects)}
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        async with _engine_at(folder, model) as engine:
            vocab_size = engine.server.model.vocab_size
            number = repeats + 1 + (repeats + 2 if break_even else 0)
            donors = [random_prompt(rng, prompt_tokens, vocab_size) for _ in range(number)]
            for donor in donors:
                await ask(engine, donor, mode=SharingMode.OFF, store=True)
        drop_from_page_cache(Path(folder) / KV_FOLDER)
        draw = partial(random_prompt, rng, vocab_size=vocab_size)
        recipients = [edited(donor, changed=changed, edits=edits, draw=draw) for donor in donors]
        async with _engine_at(folder, model) as engine:
            await engine.settle()
            rows = [await _asked(engine, recipient) for recipient in recipients[: repeats + 1]]
            status = {tier.name: tier for tier in engine.status().tiers}
            disk_rate = engine.sharing.costs()["loads"]["disk"]["bytes_per_s"]
            name = engine.server.model.name
            slow = recipients[repeats + 1 :]
            if slow:
                kv = Path(folder) / KV_FOLDER
                found |= await measured(engine, slow, share=break_even, folder=kv)
    return {
        "engine": "embedded",
        "model": name,
        **_summary(rows[1:]),  # after the first, caches and allocator are warm
        "num_from_disk": status["disk"].num_hits,
        "disk_bytes_per_s": disk_rate,
        **found,
        "environment": environment(),
    }


@asynccontextmanager
async def _engine_at(folder: str, model: str | None) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(bench_settings(folder, {"model.path": model or DEFAULT, "index.dense": False}))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


async def _asked(engine: EmbeddedEngine, recipient: TokenIds) -> dict[str, Answer]:
    """One recipient in each arm."""
    modes = {"full": SharingMode.OFF, "disk": SharingMode.APPROX, "memory": SharingMode.APPROX}
    return {
        arm: await ask(engine, recipient, mode=mode, max_tokens=_NUM_ANSWER, ignore_eos=True)
        for arm, mode in modes.items()
    }


def _summary(rows: list[dict[str, Answer]]) -> dict[str, Any]:
    """`equal_answers`: how often the text is the same from disk and from memory, which it must be."""
    ttft = {arm: median([row[arm].first_token_s for row in rows]) for arm in _ARMS}
    last = rows[-1]["disk"]
    stages = [row["disk"].finished.stage_seconds for row in rows]
    return {
        "speedup": ttft["full"] / ttft["disk"],
        "memory_speedup": ttft["full"] / ttft["memory"],
        "median_ttft_s": ttft,
        "read_s": median([stage.get("fetch", 0.0) for stage in stages]),
        "recomputed_fraction": last.report.num_missed / last.report.num_prompt_tokens,
        "decision": last.report.decision,
        "equal_answers": sum(row["disk"].text == row["memory"].text for row in rows) / len(rows),
    }
