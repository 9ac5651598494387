"""
Kills real processes that store prompts, and looks at what each leaves; for `test_kills.py`.

A process of its own, with one thread when it forks. Each child stores, lengthens and evicts prompts, and
writes the ids of those that are on disk to a pipe; after a random time it is killed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from delta_tree import NodeId
from tests.kvshare.tiers.small_store import PROMPT_TOKENS, SmallStore, wrong_nodes


def store_forever(folder: Path, first: int, *, disk: int, pipe: int) -> None:
    store = SmallStore(folder, memory=12, disk=disk)
    for number in range(first, 10**9):
        node = store.store(number)
        if node is not None and number % 2:
            store.lengthen(node, number, PROMPT_TOKENS + 9)
        if number % 3 == 0:
            store.settle()
            os.write(pipe, (json.dumps([number, *store.safe()]) + "\n").encode())


def killed(folder: Path, first: int, *, disk: int, num_lines: int, seconds: float) -> tuple[int, set[int]]:
    """
    The last prompt of a child that was killed some time after it had written so many lines, and the nodes
    that it said last to be on disk.
    """
    reader, writer = os.pipe()
    if not (child := os.fork()):
        try:
            store_forever(folder, first, disk=disk, pipe=writer)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader, encoding="utf-8") as said:
        lines = [said.readline() for _ in range(num_lines)]
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        lines += [line for line in said if line.endswith("\n")]
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL, "the child ended by itself"
    number, *nodes = json.loads(lines[-1])
    return number, set(nodes)


def problems(folder: Path, promised: set[int], *, disk: int) -> list[str]:
    store = SmallStore(folder, memory=12, disk=disk)
    found = wrong_nodes(store)
    found += [f"node {entry} is lost" for entry in promised if store.tree.get(NodeId(entry)) is None]
    store.close()
    return found


def main(num_rounds: int) -> None:
    found: list[str] = []
    num_promised = 0
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        for disk, keeps in ((30, False), (10**6, True)):  # the first evicts all the time
            first, path = 0, Path(folder) / str(disk)
            for _ in range(num_rounds):
                num_lines, seconds = draw.randint(1, 6), draw.uniform(0.0, 0.05)
                first, said = killed(path, first + 1000, disk=disk, num_lines=num_lines, seconds=seconds)
                num_promised += len(said)
                # What is evicted between the last word and the kill is not lost.
                found += problems(path, said if keeps else set(), disk=disk)
    sys.stdout.write(json.dumps({"problems": found, "num_promised": num_promised}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
