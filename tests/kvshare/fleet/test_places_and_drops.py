"""Where KV is, as journals say, and what replicas are told to drop."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from delta_tree import SegmentId
from kvshare.admin import Evict
from kvshare.errors import UpstreamError
from kvshare.fleet.client import ControlClient
from kvshare.fleet.reconciler import Reconciler
from kvshare.vllm_protocol.places import DiskProblem, Moved, OnDiskOnly
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.kvshare.fleet.served_fleet import ServedFleet, eventually, serving


def reconciler_of(fleet: ServedFleet) -> Reconciler:
    return fleet.engine.server.reconciler


class TestPlaces:
    """Where KV is, as journals say."""

    async def test_plans_know_what_lies_in_blocks_over_there(
        self, fleet: ServedFleet, vllm: FakeVllm
    ) -> None:
        """Until it has left them, is dropped, or another connector is there."""
        await fleet.report("Rome")
        replica, (segment_id, *_) = fleet.replica, vllm.segments
        other = SegmentId(segment_id + 1)
        vllm._tell(Moved((segment_id, other)))
        await eventually(lambda: replica.in_blocks == {segment_id, other})
        vllm._tell(Moved((), (other,)))
        await eventually(lambda: replica.in_blocks == {segment_id})
        vllm.evict(*vllm.segments)
        await eventually(lambda: not replica.in_blocks)

    async def test_what_left_memory_is_on_disk_and_what_was_read_is_not(
        self, fleet: ServedFleet, vllm: FakeVllm
    ) -> None:
        await fleet.report("Rome")
        on_disk, ids = fleet.engine.sharing.tier.on_disk, tuple(vllm.segments)
        vllm._tell(OnDiskOnly(came=ids))
        await eventually(lambda: all(entry in on_disk for entry in ids))
        vllm._tell(OnDiskOnly(left=ids[:1]))
        await eventually(lambda: [entry in on_disk for entry in ids] == [False, True])

    async def test_a_disk_that_fails_is_known_until_it_is_written_again(self, tmp_path: Path) -> None:
        async with (
            running_vllm(Behaviour(max_disk_bytes=10**8)) as vllm,
            serving(tmp_path, vllm) as fleet,
        ):
            for reason in ("no space is left", ""):
                vllm.report_disk(reason)
                await eventually(
                    lambda reason=reason: (
                        fleet.replica.info is not None  # type: ignore[misc]
                        and fleet.replica.info.disk_problem == DiskProblem(reason)
                    )
                )


class TestDrops:
    """What no prompt uses any more."""

    async def test_an_eviction_reaches_the_replica_at_once(self, fleet: ServedFleet, vllm: FakeVllm) -> None:
        """Not only when its next event comes."""
        await fleet.report("Rome")
        held = set(vllm.segments)
        await fleet.engine.execute(Evict(all=True, dry_run=False))
        await fleet.engine.settle()
        assert set(vllm.dropped) == held
        assert vllm.left_in_store == []

    async def test_drops_that_do_not_arrive_are_sent_with_the_next_ones(
        self, fleet: ServedFleet, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of both kinds, and once."""
        await fleet.report("Rome")
        held = set(vllm.segments)

        async def fail(self: ControlClient, *_: object, **__: object) -> None:
            raise UpstreamError("away")

        with monkeypatch.context() as patch:
            patch.setattr(ControlClient, "drop", fail)
            await fleet.engine.execute(Evict(all=True, dry_run=False))
            await fleet.engine.settle()
            assert vllm.dropped == []
        await reconciler_of(fleet).send_drops(fleet.replica)
        assert set(vllm.dropped) == held
        await reconciler_of(fleet).send_drops(fleet.replica)
        assert len(vllm.dropped) == len(held)

    async def test_after_its_end_nothing_is_sent(self, fleet: ServedFleet, vllm: FakeVllm) -> None:
        """A drop that was on its way between the threads finds a closed reconciler."""
        await fleet.report("Rome")
        reconciler, tier = reconciler_of(fleet), fleet.engine.server.runtime.keeper.tier
        reconciler._on_drop(fleet.replica.name)
        await reconciler.close()
        await asyncio.sleep(0)
        assert len(reconciler.sending) == 0
        tier.drop(list(vllm.segments))
        await asyncio.sleep(0)
        assert len(reconciler.sending) == 0
        assert vllm.dropped == []
