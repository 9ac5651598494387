"""Replicas and proxies that restart or lose their memory: the tree stays in step with what is held."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvshare.errors import NoReplicaError
from kvshare.fleet.reconciler import Reconciler
from kvshare.fleet.replica import Replica
from tests.fake_vllm import FakeVllm, running_vllm
from tests.kvshare.fleet.served_fleet import FORM, OTHER, ServedFleet, eventually, serving
from vector_index.qdrant_remote import QdrantRemoteIndex


async def test_a_restarted_replica_has_lost_everything(fleet: ServedFleet, vllm: FakeVllm) -> None:
    """A new epoch: its prompts leave tree and index, and new ones are kept again."""
    await fleet.report("Rome")
    await vllm.restart()
    await eventually(lambda: not fleet.nodes)
    await eventually(lambda: bool(fleet.engine.fleet.sharing()))
    await fleet.report("Oslo")
    assert vllm.tickets[-1].copies == ()
    assert len(fleet.nodes) == 1


async def test_the_journal_does_not_wait_for_the_index(
    fleet: ServedFleet, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a Qdrant server that hangs: prompts are stored and evicted as they are reported."""

    async def hang(*_: object) -> None:
        await asyncio.sleep(60)

    with monkeypatch.context() as hung:
        hung.setattr(QdrantRemoteIndex, "upsert", hang)
        hung.setattr(QdrantRemoteIndex, "delete", hang)
        for place in ("Rome", "Oslo", "Lima"):
            await fleet.send(FORM.format(place=place))
        await eventually(lambda: len(fleet.nodes) == 3)
        vllm.evict(*tuple(vllm.segments))
        await eventually(lambda: not fleet.nodes)
        await fleet.engine.server.runtime.background.cancel()


async def test_missed_events_are_made_up_for(fleet: ServedFleet, vllm: FakeVllm) -> None:
    """A gap in the journal: what is held is asked for, and what is gone leaves."""
    await fleet.report("Rome")
    await fleet.ask(OTHER)
    first = fleet.nodes[0]
    for segment_id in first.pieces.segment_ids:
        del vllm.segments[segment_id]
    vllm.events.append(vllm.events[0])
    vllm.forget_events()  # the next question is behind a gap
    vllm.evict()
    await eventually(lambda: len(fleet.nodes) == 1)
    assert fleet.engine.sharing.tree.get(first.node_id) is None


async def test_a_lost_replica_leaves_the_tree_and_comes_back(vllm: FakeVllm, tmp_path: Path) -> None:
    """Silent for too long: its prompts are let go; then it is served and shared with again."""
    async with serving(tmp_path, vllm, vllm__lost_after_s=0.3) as fleet:
        await fleet.report("Rome")
        await vllm.stop()
        await eventually(lambda: not fleet.nodes)
        assert not fleet.engine.status().ready
        with pytest.raises(NoReplicaError):
            await fleet.report("Oslo")
        await vllm.start()
        await eventually(lambda: bool(fleet.engine.fleet.sharing()))
        assert (await fleet.report("Oslo")).progress.is_complete


async def test_a_loss_that_cannot_be_noted_does_not_end_the_watch(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried again; and the replica is heard when it comes back."""
    failures: list[str] = []

    async def fail(self: Reconciler, replica: Replica) -> None:
        failures.append(replica.name)
        raise OSError("No space left on device")

    async with serving(tmp_path, vllm, vllm__lost_after_s=0.3) as fleet:
        await fleet.report("Rome")
        with monkeypatch.context() as patch:
            patch.setattr(Reconciler, "evict_replica", fail)
            await vllm.stop()
            await eventually(lambda: len(failures) > 1)
        await vllm.start()
        await eventually(lambda: bool(fleet.engine.fleet.sharing()))
        assert (await fleet.report("Oslo")).progress.is_complete


async def test_a_replica_that_was_silent_for_a_moment_keeps_its_prompts(
    fleet: ServedFleet, vllm: FakeVllm
) -> None:
    """The same epoch after a broken connection: what happened meanwhile is read on, not guessed."""
    await fleet.report("Rome")
    await vllm.stop()
    await eventually(lambda: not fleet.engine.fleet.serving())
    await vllm.start()
    await eventually(lambda: bool(fleet.engine.fleet.sharing()))
    assert len(fleet.nodes) == 1
    await fleet.report("Oslo")
    assert vllm.tickets[-1].copies


async def test_a_proxy_that_restarts_finds_what_is_still_held(vllm: FakeVllm, tmp_path: Path) -> None:
    """The tree of the last run, as far as the replica kept up with it; the rest is dropped on both sides."""
    async with serving(tmp_path, vllm) as fleet:
        await fleet.report("Rome")
        await fleet.ask(OTHER)
        gone = fleet.nodes[1]
    for segment_id in gone.pieces.segment_ids:
        vllm.evict(segment_id)
    async with serving(tmp_path, vllm) as fleet:
        await eventually(lambda: len(fleet.nodes) == 1)
        assert fleet.engine.sharing.tree.get(gone.node_id) is None
        await fleet.report("Oslo")
        assert vllm.tickets[-1].copies


async def test_a_proxy_that_restarts_drops_what_it_never_heard_of(
    vllm: FakeVllm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Segments that no prompt refers to are found by nobody; after a while they are let go."""
    monkeypatch.setattr("kvshare.fleet.orphans.GRACE_S", 0.1)
    async with serving(tmp_path / "one", vllm) as fleet:
        await fleet.report("Rome")
    assert vllm.segments
    async with serving(tmp_path / "two", vllm) as fleet:
        (status,) = fleet.engine.status().replicas
        assert (status.name, status.num_segments) == (vllm.url.removeprefix("http://"), 2)
        await eventually(lambda: not vllm.segments)


async def test_a_replica_that_does_not_come_back_takes_its_prompts_along(
    vllm: FakeVllm, tmp_path: Path
) -> None:
    """After a restart of the proxy nobody is waited for forever."""
    async with serving(tmp_path, vllm) as fleet:
        await fleet.report("Rome")
    await vllm.stop()
    async with serving(tmp_path, vllm, wait=False, vllm__lost_after_s=0.3) as fleet:
        assert len(fleet.nodes) == 1
        await eventually(lambda: not fleet.nodes)


@pytest.fixture
def with_disk(vllm: FakeVllm) -> FakeVllm:
    """What it holds is there after a restart."""
    vllm.behaviour.max_disk_bytes = 10**8
    return vllm


async def test_a_vllm_that_restarts_with_a_disk_is_shared_with_again(
    with_disk: FakeVllm, tmp_path: Path
) -> None:
    """Its prompts stay in the tree; a plan prices what is on disk, and its ticket says how long to wait."""
    async with serving(tmp_path, with_disk) as fleet:
        await fleet.report("Rome")
        await with_disk.restart()
        await eventually(lambda: bool(fleet.engine.fleet.sharing()))
        held = fleet.nodes[0].pieces.segment_ids
        await eventually(lambda: all(entry in fleet.engine.sharing.tier.on_disk for entry in held))
        await fleet.report("Oslo")
        ticket = with_disk.tickets[-1]
        assert ticket.copies
        assert ticket.disk_s > 0
        assert "disk" in fleet.engine.sharing.costs()["loads"]


async def test_a_restart_that_lost_a_segment_loses_the_prompts_that_used_it(
    with_disk: FakeVllm, tmp_path: Path
) -> None:
    """It was not written yet, or its file is damaged."""
    async with serving(tmp_path, with_disk) as fleet:
        await fleet.report("Rome")
        await fleet.ask(OTHER)
        kept, gone = fleet.nodes
        await with_disk.stop()
        for segment_id in gone.pieces.segment_ids:
            del with_disk.segments[segment_id]
        await with_disk.restart()
        await eventually(lambda: len(fleet.nodes) == 1)
        assert fleet.engine.sharing.tree.get(kept.node_id) is not None


async def test_a_lost_replica_with_a_disk_keeps_its_prompts(
    with_disk: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However long it takes to come back."""
    async with serving(tmp_path, with_disk, vllm__lost_after_s=0.1) as fleet:
        await fleet.report("Rome")
        await with_disk.stop()
        await eventually(lambda: "its prompts stay, as it has a disk" in caplog.text)
        assert len(fleet.nodes) == 1
        await with_disk.restart()
        await eventually(lambda: bool(fleet.engine.fleet.sharing()))
        await fleet.report("Oslo")
        assert with_disk.tickets[-1].copies


async def test_both_restart_and_the_one_with_the_disk_is_slower(with_disk: FakeVllm, tmp_path: Path) -> None:
    """The proxy remembers that it had a disk, and waits for it longer than for another one."""
    async with serving(tmp_path, with_disk) as fleet:
        await fleet.report("Rome")
    await with_disk.stop()
    async with serving(tmp_path, with_disk, wait=False, vllm__lost_after_s=0.1) as fleet:
        await asyncio.sleep(0.5)
        assert len(fleet.nodes) == 1
        await with_disk.restart()
        await eventually(lambda: bool(fleet.engine.fleet.sharing()))
        await fleet.report("Oslo")
        assert with_disk.tickets[-1].copies


async def test_a_damaged_store_is_moved_aside_and_told(
    vllm: FakeVllm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The proxy starts; what the replica still holds of the last run is given up, and new prompts share."""
    async with serving(tmp_path, vllm) as fleet:
        await fleet.report("Rome")
    damaged = b"no database" * 999
    (tmp_path / "tree.sqlite3").write_bytes(damaged)
    async with serving(tmp_path, vllm) as fleet:
        assert len(fleet.nodes) == 0
        await fleet.report("Rome")
        await fleet.report("Oslo")
        assert vllm.tickets[-1].copies
    assert (tmp_path / "tree.sqlite3.old").read_bytes() == damaged
    (message,) = [message for message in caplog.messages if "is damaged" in message]
    assert "KV of earlier prompts in the replicas is dropped" in message


async def test_a_replica_that_comes_later_is_found_long_before_the_next_check(tmp_path: Path) -> None:
    """A replica that does not serve yet is asked again after short pauses."""
    async with running_vllm() as vllm:
        await vllm.stop()
        async with serving(tmp_path, vllm, wait=False, vllm__health_interval_s=60.0) as fleet:
            assert not fleet.engine.fleet.serving()
            await vllm.start()
            await eventually(lambda: bool(fleet.engine.fleet.serving()))
