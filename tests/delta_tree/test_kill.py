"""A real `kill -9` in the middle of writing."""

import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from delta_tree import DeltaTree
from tests.delta_tree import endless_inserts
from tests.delta_tree.fake_prompts import fresh_draft

_ROUNDS = 8


def replay(lines: list[str], known: set[int]) -> set[int]:
    """The nodes that must be there after the changes that the program reported."""
    for line in lines:
        change = int(line)
        if change > 0:
            known.add(change)
        elif change < 0:
            known.discard(-change)
        else:
            known.clear()
    return known


def check(tree: DeltaTree) -> None:
    """All nodes are whole, and counts are what counting anew gives."""
    counts: Counter[int] = Counter()
    for node in tree.nodes():
        assert node.pieces.num_tokens == node.num_tokens
        counts.update(node.pieces.segment_ids)
        for parent in tree.ancestors(node.node_id)[:1]:
            assert node.node_id in tree.children(parent)
    assert {s.segment_id: tree.reference_count(s.segment_id) for s in tree.segments()} == counts


def test_a_killed_writer_leaves_nothing_half_written(tmp_path: Path) -> None:
    """After SIGKILL at random moments the store opens whole, with all that was reported done."""
    path, rng = tmp_path / "tree.sqlite", random.Random(5)
    known: set[int] = set()
    for round_number in range(_ROUNDS):
        writer = subprocess.Popen(
            [sys.executable, endless_inserts.__file__, str(path), str(round_number)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        first = writer.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.3))
        writer.kill()
        with writer.stdout:  # not communicate(), which loses what readline has read ahead
            rest = writer.stdout.read()
        assert writer.wait(timeout=120) == -9
        # The last line may be cut off; a change may be stored and its report not yet written.
        lines = (first + rest).rpartition("\n")[0].splitlines()
        known = replay(lines, known)
        with DeltaTree.open(path, identity="model") as tree:
            check(tree)
            held = {node.node_id for node in tree.nodes()}
            assert len(held ^ known) <= 1 or not held
            known = set(held)
    with DeltaTree.open(path, identity="model") as tree:
        assert tree.insert(fresh_draft([1, 2, 3])).created


def test_the_store_of_a_killed_writer_can_be_read(tmp_path: Path) -> None:
    """A read-only look is possible although the journal must be rolled back first."""
    path = tmp_path / "tree.sqlite"
    writer = subprocess.Popen(
        [sys.executable, endless_inserts.__file__, str(path), "1"], stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    for _ in range(20):
        writer.stdout.readline()
    writer.kill()
    writer.communicate(timeout=120)
    with DeltaTree.open(path, identity="model", read_only=True) as tree:
        check(tree)
