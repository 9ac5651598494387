"""Replicas that share a store: what one has computed, the other loads; and what neither may lose of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from delta_tree import SegmentId
from kvshare.admin import Evict
from kvshare.fleet import orphans
from kvshare.reasons import Reason
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.kvshare.fleet.served_fleet import OTHER, ServedFleet, eventually, serving


def sharing(store: str) -> Behaviour:
    return Behaviour(shared_store=store, max_disk_bytes=10**8)


@asynccontextmanager
async def two(store: str = "a store") -> AsyncIterator[tuple[FakeVllm, FakeVllm]]:
    """The second one shares this store."""
    async with (
        running_vllm(sharing("a store")) as one,
        running_vllm(sharing(store)) as other,
    ):
        yield one, other


async def computed_by_one(fleet: ServedFleet, one: FakeVllm, other: FakeVllm) -> tuple[FakeVllm, FakeVllm]:
    """One of them has a prompt. Returns the one and the other."""
    await fleet.report("Rome")
    return (one, other) if one.generated else (other, one)


async def hears(fleet: ServedFleet, who: FakeVllm, of: FakeVllm) -> None:
    """Of what the other has written."""
    who.adopt(of)
    memory = fleet.memory_of(who)
    await eventually(lambda: set(memory.segments) >= set(of.segments))


async def looked(fleet: ServedFleet) -> None:
    """The only replica has looked at all of its store, and what it has found is applied."""
    watcher, replica = fleet.watcher, fleet.replica
    await eventually(lambda: watcher.has_listed.is_set())
    await eventually(lambda: watcher._is_in_step and replica.info is not None and not replica.info.is_listing)


async def test_what_one_computed_the_other_loads(tmp_path: Path) -> None:
    """It is busy, so the other one gets the request, with a plan that says how long its reads may take."""
    async with two() as pair, serving(tmp_path, *pair, vllm__max_inflight=1) as fleet:
        home, other = await computed_by_one(fleet, *pair)
        await hears(fleet, other, home)
        fleet.replica_of(home).num_inflight += 1  # one request that takes long
        await fleet.report("Oslo")
        assert len(other.generated) == 1
        ticket = other.tickets[-1]
        assert ticket.copies
        assert ticket.disk_s > 0
        assert ticket.namespace == home.tickets[0].namespace


async def test_what_is_not_in_the_store_yet_is_computed(tmp_path: Path) -> None:
    """The other one has no plan for it, and the report says where the KV is."""
    async with two() as pair, serving(tmp_path, *pair, vllm__max_inflight=1) as fleet:
        home, other = await computed_by_one(fleet, *pair)
        fleet.replica_of(home).num_inflight += 1
        request = await fleet.report("Oslo")
        assert len(other.generated) == 1
        assert other.tickets[-1].copies == ()
        assert request.routed.plan.reason is Reason.KV_ELSEWHERE


async def test_other_stores_are_apart(tmp_path: Path) -> None:
    """As replicas without one."""
    async with two("another store") as pair, serving(tmp_path, *pair) as fleet:
        await fleet.report("Rome")
        await fleet.ask(OTHER)
        one, other = pair
        assert one.tickets[0].namespace != other.tickets[0].namespace


async def test_one_that_drops_it_loses_nothing_for_the_other(tmp_path: Path) -> None:
    """Only when nobody has a segment any more its prompts leave."""
    async with two() as pair, serving(tmp_path, *pair) as fleet:
        home, other = await computed_by_one(fleet, *pair)
        await hears(fleet, other, home)
        ids = tuple(home.segments)
        home.evict(*ids)
        await fleet.ask(OTHER)  # its events have come then
        held = fleet.engine.sharing.tier
        assert all(segment_id in held for segment_id in ids)
        assert any(node.pieces.segment_ids <= set(ids) for node in fleet.nodes)
        other.evict(*ids)
        await eventually(lambda: not any(segment_id in held for segment_id in ids))
        await eventually(lambda: len(fleet.nodes) == 1)


async def test_an_eviction_reaches_all_who_hold_it(tmp_path: Path) -> None:
    """Each drops it, and the store does not keep it."""
    async with two() as pair, serving(tmp_path, *pair) as fleet:
        home, other = await computed_by_one(fleet, *pair)
        await hears(fleet, other, home)
        ids = set(home.segments)
        (node,) = fleet.nodes
        await fleet.engine.execute(Evict(node=node.node_id))
        await eventually(lambda: set(home.dropped) == set(other.dropped) == ids)
        assert home.left_in_store == other.left_in_store == []


async def test_what_another_proxy_has_stored_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some time, so that it takes no room here; the store keeps it for that proxy."""
    monkeypatch.setattr(orphans, "GRACE_S", 0.2)
    async with two() as pair, serving(tmp_path, *pair) as fleet:
        home, other = await computed_by_one(fleet, *pair)
        await hears(fleet, other, home)
        foreign = FakeVllm()
        foreign.segments = {SegmentId(7): ("foreign", (1, 2, 3))}
        await hears(fleet, other, foreign)
        await eventually(lambda: SegmentId(7) in other.left_in_store)
        assert set(other.dropped) == {SegmentId(7)}
        assert set(home.segments) <= set(other.segments)


async def test_after_a_restart_another_one_has_it(tmp_path: Path) -> None:
    """Of the proxy and of both vLLMs: the prompts of the one that does not come back are the other one's."""
    async with two() as pair:
        async with serving(tmp_path, *pair) as fleet:
            home, other = await computed_by_one(fleet, *pair)
        other.segments, home.segments = dict(home.segments), {}
        other.on_disk = set(other.segments)
        async with serving(tmp_path, *pair) as fleet:
            await fleet.report("Oslo")
            assert other.tickets[-1].copies
            assert len(fleet.nodes) == 2


@pytest.mark.parametrize("has_own_disk", [True, False])
async def test_a_lost_replica_with_a_disk_of_its_own_keeps_what_only_it_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, has_own_disk: bool
) -> None:
    """Another one that shares the store has not heard of it; the log says what is done."""
    async with two() as pair, serving(tmp_path, *pair, vllm__lost_after_s=0.1) as fleet:
        home, _ = await computed_by_one(fleet, *pair)
        home.behaviour.has_own_disk = has_own_disk
        await home.restart()
        replica = fleet.replica_of(home)
        await eventually(lambda: replica.info is not None and replica.info.has_own_disk is has_own_disk)
        await eventually(lambda: replica.is_connected)
        await home.stop()
        await eventually(lambda: "is lost, and its prompts" in caplog.text)
        if has_own_disk:
            assert "its prompts stay, as it has a disk" in caplog.text
            assert len(fleet.nodes) == 1
        else:
            assert "are evicted but for those that another replica has found in their store" in caplog.text
            await eventually(lambda: len(fleet.nodes) == 0)


@pytest.mark.parametrize("is_found", [True, False])
async def test_a_restarted_vllm_that_still_looks_loses_nothing_yet(tmp_path: Path, is_found: bool) -> None:
    """What it has not found in the store when it has looked at all of it is lost."""
    async with running_vllm(sharing("a store")) as vllm, serving(tmp_path, vllm) as fleet:
        await fleet.report("Rome")
        held, vllm.segments = vllm.segments, {}
        (node,) = fleet.nodes
        vllm.behaviour.is_listing = True
        await vllm.restart()
        replica = fleet.replica
        await eventually(lambda: replica.is_connected and bool(replica.info and replica.info.is_listing))
        assert len(fleet.nodes) == 1
        if is_found:
            vllm.segments = held
            vllm.on_disk = set(held)
        vllm.behaviour.is_listing = False
        await looked(fleet)
        await eventually(lambda: len(fleet.nodes) == is_found)
        if is_found:
            await fleet.report("Oslo")
            assert vllm.tickets[-1].copies
            assert fleet.engine.sharing.tree.get(node.node_id) is not None


async def test_a_restarted_proxy_waits_for_who_still_looks(tmp_path: Path) -> None:
    """Longer than for a replica that is lost."""
    async with running_vllm(sharing("a store")) as vllm:
        async with serving(tmp_path, vllm) as fleet:
            await fleet.report("Rome")
        held, vllm.segments, vllm.behaviour.is_listing = vllm.segments, {}, True
        async with serving(tmp_path, vllm, vllm__lost_after_s=0.1) as fleet:
            await asyncio.sleep(0.5)
            assert len(fleet.nodes) == 1
            vllm.segments, vllm.on_disk, vllm.behaviour.is_listing = held, set(held), False
            await looked(fleet)
            await fleet.report("Oslo")
            assert vllm.tickets[-1].copies
