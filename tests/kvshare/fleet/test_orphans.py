"""What replicas hold and no prompt uses: dropped after a time in which its prompt may still be reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from delta_tree import SegmentId
from kvshare.fleet import orphans
from kvshare.fleet.orphans import Orphans
from kvshare.fleet.replica_keeper import ReplicaKeeper
from tests.fake_vllm import FakeVllm
from tests.kvshare.fleet.reports import offer, prompt, whole
from tests.kvshare.fleet.served_fleet import ServedFleet, eventually, serving


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Writing:
    """The runtime, as far as orphans need it."""

    def __init__(self, keeper: ReplicaKeeper) -> None:
        self.keeper = keeper

    async def write(self, function: object, *arguments: object) -> None:
        assert callable(function)
        function(*arguments)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(orphans, "time", clock)
    return clock


@pytest.fixture
def found(keeper: ReplicaKeeper, clock: Clock) -> Orphans:
    return Orphans(Writing(keeper))  # type: ignore[arg-type]  # all that is called


def held(keeper: ReplicaKeeper, *numbers: int) -> list[SegmentId]:
    segments = [SegmentId(number) for number in numbers]
    keeper.tier.add("a", dict.fromkeys(segments, 10))
    return segments


async def test_they_are_dropped_when_their_time_is_over(
    keeper: ReplicaKeeper, found: Orphans, clock: Clock
) -> None:
    """Not a moment before; each once, in the order in which they came."""
    found.begin("a", held(keeper, 1))
    clock.now += 10
    found.note("a", held(keeper, 2))
    clock.now += 19.9
    await found.tidy("a")
    assert keeper.tier.take_orphans("a") == []
    clock.now += 0.1
    await found.tidy("a")
    assert keeper.tier.take_orphans("a") == [1]
    clock.now += 10
    await found.tidy("a")
    await found.tidy("a")
    assert keeper.tier.take_orphans("a") == [2]
    assert keeper.tier.take_dropped("a") == []  # of a store that another proxy may use


async def test_what_a_prompt_has_come_to_use_stays(
    keeper: ReplicaKeeper, found: Orphans, clock: Clock
) -> None:
    report = whole()
    (segment_id,) = (entry.segment_id for entry in report.stored)
    found.note("a", held(keeper, segment_id, 5))
    assert offer(keeper, report, prompt(1)) is not None
    clock.now += 31
    await found.tidy("a")
    assert keeper.tier.take_orphans("a") == [5]
    assert keeper.tier.held_by("a") == {segment_id}


async def test_a_new_connection_begins_a_new_time(
    keeper: ReplicaKeeper, found: Orphans, clock: Clock
) -> None:
    """What was noted of the process before is forgotten: it may not hold it any more."""
    found.begin("a", held(keeper, 1, 2))
    clock.now += 29
    found.begin("a", [SegmentId(2)])
    clock.now += 2
    await found.tidy("a")
    assert keeper.tier.take_orphans("a") == []
    clock.now += 29
    await found.tidy("a")
    assert keeper.tier.take_orphans("a") == [2]


async def test_each_replica_has_its_own(keeper: ReplicaKeeper, found: Orphans, clock: Clock) -> None:
    """And one of which nothing was noted has none."""
    found.note("a", held(keeper, 1))
    clock.now += 31
    await found.tidy("b")
    assert keeper.tier.held_by("a") == {1}
    await found.tidy("a")
    assert keeper.tier.held_by("a") == set()


async def test_what_no_prompt_of_this_server_uses_leaves_its_replica(
    fleet: ServedFleet, vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one stored it; the drop says that a store keeps it."""
    monkeypatch.setattr(orphans, "GRACE_S", 0.05)
    await fleet.report("Rome")
    theirs = set(vllm.segments)
    await fleet.engine.stop()
    async with serving(tmp_path / "another store", vllm):
        await eventually(lambda: not vllm.segments)
    assert set(vllm.left_in_store) == set(vllm.dropped) == theirs
    await fleet.engine.start()  # as the fixture stops it
