"""A keeper of two replicas; a fake vLLM and the fleet in front of it; a real control server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from delta_tree import DeltaTree
from kvshare.fleet import watcher
from kvshare.fleet.remote_tier import RemoteTier
from kvshare.fleet.replica_keeper import ReplicaKeeper
from tests.fake_vllm import FakeVllm, running_vllm
from tests.kvshare.fleet.real_control import RealControl, running_control
from tests.kvshare.fleet.served_fleet import ServedFleet, eventually, serving, watching


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[ReplicaKeeper]:
    with DeltaTree.open(tmp_path / "tree.sqlite3", identity="test") as tree:
        yield ReplicaKeeper(tree, RemoteTier("ab"), min_tokens=8)


@pytest.fixture
async def vllm() -> AsyncIterator[FakeVllm]:
    async with running_vllm() as replica:
        yield replica


@pytest.fixture
async def fleet(vllm: FakeVllm, tmp_path: Path) -> AsyncIterator[ServedFleet]:
    """In front of this replica."""
    async with serving(tmp_path / "store", vllm) as running:
        yield running


@pytest.fixture
async def control() -> AsyncIterator[RealControl]:
    async with running_control() as server:
        yield server


@pytest.fixture
async def watched(vllm: FakeVllm, control: RealControl) -> AsyncIterator[ServedFleet]:
    async with watching(vllm, control) as fleet:
        await eventually(lambda: fleet.replica.shares)
        yield fleet


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails is tried again soon."""
    monkeypatch.setattr(watcher, "_FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(watcher, "_LONGEST_PAUSE_S", 0.1)
