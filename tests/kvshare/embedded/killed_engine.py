"""
Kills embedded engines that store prompts, and has each next one look at what is left; for `test_kills.py`.

A process of its own, with one thread when it forks. Each child compares answers from the disk with those of a
full prefill, then stores prompts, and writes to a pipe which are on disk; after a random time it is killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

from kvshare.embedded.engine import EmbeddedEngine
from kvshare.requests import SharingMode
from kvshare.sharing.memory_keeper import MemoryKeeper
from kvshare.tiers.tier_stack import TierStack
from kvshare_lab.bench.harness import ask
from tests.kvshare.embedded.tiny_engine import engine_at, prompt, stored

NUM_TOKENS = 300
COMPARED = 3  # prompts of each start


def on_disk(engine: EmbeddedEngine) -> set[bytes]:
    """The tokens of the prompts whose KV is on disk as a whole."""
    keeper = cast("MemoryKeeper[Any]", engine.sharing.keeper)
    stack = keeper.tier
    assert isinstance(stack, TierStack)
    nodes = keeper.tree.nodes()
    return {
        node.token_ids.tobytes()
        for node in nodes
        if all(segment_id in stack.below for segment_id in node.pieces.segment_ids)
    }


async def wrong(engine: EmbeddedEngine, numbers: list[int]) -> list[int]:
    """Those of the prompts whose answers are others than in full, or of which little is reused."""
    found = []
    for number in numbers:
        tokens = prompt(NUM_TOKENS, seed=number)
        shared, full = [
            await ask(engine, tokens, mode=mode, tenant="t", max_tokens=8)
            for mode in (SharingMode.APPROX, SharingMode.OFF)
        ]
        if shared.text != full.text or shared.report.num_cached < NUM_TOKENS // 2:
            found.append(number)
    return found


async def store_forever(
    folder: Path, promised: list[int], first: int, draw: random.Random, pipe: int
) -> None:
    def say(**what: object) -> None:
        os.write(pipe, (json.dumps(what) + "\n").encode())

    engine = engine_at(folder)
    await engine.start()
    await engine.settle()
    there = on_disk(engine)
    lost = [number for number in promised if prompt(NUM_TOKENS, seed=number).tobytes() not in there]
    compared = draw.sample(promised, min(COMPARED, len(promised)))
    say(lost=lost, wrong=await wrong(engine, compared), num_compared=len(compared))
    for number in range(first, 10**9):
        await stored(engine, prompt(NUM_TOKENS, seed=number))
        there = on_disk(engine)
        own = [each for each in range(first, number + 1) if prompt(NUM_TOKENS, seed=each).tobytes() in there]
        say(on_disk=own)


def killed(folder: Path, promised: list[int], first: int, draw: random.Random) -> list[dict[str, Any]]:
    """What a child has said, which was killed some time after some of it."""
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            asyncio.run(store_forever(folder, promised, first, draw, writer))
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, encoding="utf-8") as said:
        lines = [said.readline() for _ in range(draw.randint(2, 6))]
        time.sleep(draw.uniform(0.0, 0.1))
        os.kill(child, signal.SIGKILL)
        lines += [line for line in said if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "the child ended by itself"
    return [json.loads(line) for line in lines]


def main(num_rounds: int) -> None:
    draw, promised = random.Random(0), list[int]()
    found: dict[str, Any] = {"lost": [], "wrong": [], "num_compared": 0, "num_kills": 0}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(num_rounds):
            start, *stores = killed(Path(folder), promised, 1000 * number, draw)
            for name, value in start.items():
                found[name] += value
            found["num_kills"] += 1
            promised += stores[-1]["on_disk"] if stores else []
    sys.stdout.write(json.dumps({**found, "num_promised": len(promised)}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
