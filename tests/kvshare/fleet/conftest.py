"""A keeper of two replicas."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from delta_tree import (
    DeltaTree,
)
from kvshare.fleet.remote_tier import RemoteTier
from kvshare.fleet.replica_keeper import ReplicaKeeper


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[ReplicaKeeper]:
    with DeltaTree.open(tmp_path / "tree.sqlite3", identity="test") as tree:
        yield ReplicaKeeper(tree, RemoteTier("ab"), min_tokens=8)
