"""Stores on disk, and an empty tree in memory."""

from pathlib import Path

import pytest

from delta_tree import (
    DeltaTree,
)
from tests.delta_tree.fake_prompts import child_draft, fresh_draft
from tests.delta_tree.stores import IDENTITY, write_earlier


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store may be made, in a folder that does not exist yet."""
    return tmp_path / "store" / "tree.sqlite"


@pytest.fixture
def filled(path: Path) -> Path:
    """A closed store of 12 prompts, each but the first a child of the one before."""
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        node = tree.insert(fresh_draft(list(range(200)))).node
        for index in range(11):
            node = tree.insert(child_draft(node, 190 - index, [1000 + index] * 5)).node
        tree.pin(node.node_id)
    return path


@pytest.fixture
def old(path: Path) -> Path:
    """
    A store as version 1 wrote it.

        1 40 tokens     2 a child of 1, 3 another, pinned     4 a child of 2, used once     5 another tenant's
    """
    write_earlier(path, 1)
    return path


@pytest.fixture
def tree() -> DeltaTree:
    """An empty tree in memory whose clock ticks once per look."""
    ticks = iter(range(1, 1000))
    return DeltaTree.open(None, identity="model", clock=lambda: float(next(ticks)))
