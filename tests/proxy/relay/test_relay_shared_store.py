"""Replicas that share a store: what one has computed, the other loads; and what neither may lose of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from delta_tree import SegmentId
from kvshare.fleet import orphans
from tests.fake_vllm import Behaviour, FakeVllm, running_vllm
from tests.proxy.conftest import eventually
from tests.proxy.relay.relay_server import OTHER, Relay, running_relay


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


async def computed_by_one(relay: Relay, one: FakeVllm, other: FakeVllm) -> tuple[FakeVllm, FakeVllm]:
    """One of them has a prompt. Returns the one and the other."""
    await relay.chat("Rome")
    return (one, other) if one.generated else (other, one)


async def hears(relay: Relay, who: FakeVllm, of: FakeVllm) -> None:
    """Of what the other has written."""
    who.adopt(of)
    memories = relay.engine.sharing.tier.memories  # type: ignore[attr-defined]  # of a fleet
    name = next(each.name for each in relay.engine.fleet.replicas if each.vllm.url == who.url)
    await eventually(lambda: set(memories[name].segments) >= set(of.segments))


async def test_what_one_computed_the_other_loads(tmp_path: Path) -> None:
    """It is busy, so the other one gets the request, with a plan that says how long its reads may take."""
    async with two() as pair, running_relay(tmp_path, *pair, vllm__max_inflight=1) as relay:
        home, other = await computed_by_one(relay, *pair)
        await hears(relay, other, home)
        for replica in relay.engine.fleet.replicas:
            if replica.vllm.url == home.url:
                replica.num_inflight += 1  # one request that takes long
        response = await relay.chat("Oslo")
        assert response.headers["x-kvshare-decision"] in {"approx", "exact"}
        assert len(other.generated) == 1
        ticket = other.tickets[-1]
        assert ticket.copies
        assert ticket.disk_s > 0
        assert ticket.namespace == home.tickets[0].namespace


async def test_what_is_not_in_the_store_yet_is_computed(tmp_path: Path) -> None:
    """The other one has no plan for it, and the report says where the KV is."""
    async with two() as pair, running_relay(tmp_path, *pair, vllm__max_inflight=1) as relay:
        home, other = await computed_by_one(relay, *pair)
        for replica in relay.engine.fleet.replicas:
            if replica.vllm.url == home.url:
                replica.num_inflight += 1
        response = await relay.chat("Oslo")
        assert len(other.generated) == 1
        assert other.tickets[-1].copies == ()
        assert response.headers["x-kvshare-reason"] == "kv_elsewhere"


async def test_other_stores_are_apart(tmp_path: Path) -> None:
    """As replicas without one."""
    async with two("another store") as pair, running_relay(tmp_path, *pair) as relay:
        await relay.chat("Rome")
        await relay.ask(OTHER)
        one, other = pair
        assert one.tickets[0].namespace != other.tickets[0].namespace


async def test_one_that_drops_it_loses_nothing_for_the_other(tmp_path: Path) -> None:
    """Only when nobody has a segment any more its prompts leave."""
    async with two() as pair, running_relay(tmp_path, *pair) as relay:
        home, other = await computed_by_one(relay, *pair)
        await hears(relay, other, home)
        ids = tuple(home.segments)
        home.evict(*ids)
        await relay.ask(OTHER)  # its events have come then
        held = relay.engine.sharing.tier
        assert all(segment_id in held for segment_id in ids)
        assert any(node.pieces.segment_ids <= set(ids) for node in relay.engine.sharing.tree.nodes())
        other.evict(*ids)
        await eventually(lambda: not any(segment_id in held for segment_id in ids))
        await eventually(lambda: relay.num_nodes == 1)


async def test_an_eviction_reaches_all_who_hold_it(tmp_path: Path) -> None:
    """Each drops it, and the store does not keep it."""
    async with two() as pair, running_relay(tmp_path, *pair) as relay:
        home, other = await computed_by_one(relay, *pair)
        await hears(relay, other, home)
        ids = set(home.segments)
        (node,) = relay.engine.sharing.tree.nodes()
        response = await relay.send("/admin/evict", {"node": node.node_id})
        assert response.status == 200
        await eventually(lambda: set(home.dropped) == set(other.dropped) == ids)
        assert home.left_in_store == other.left_in_store == []


async def test_what_another_proxy_has_stored_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some time, so that it takes no room here; the store keeps it for that proxy."""
    monkeypatch.setattr(orphans, "GRACE_S", 0.2)
    async with two() as pair, running_relay(tmp_path, *pair) as relay:
        home, other = await computed_by_one(relay, *pair)
        await hears(relay, other, home)
        foreign = FakeVllm()
        foreign.segments = {SegmentId(7): ("foreign", (1, 2, 3))}
        await hears(relay, other, foreign)
        await eventually(lambda: SegmentId(7) in other.left_in_store)
        assert set(other.dropped) == {SegmentId(7)}
        assert set(home.segments) <= set(other.segments)


async def test_after_a_restart_another_one_has_it(tmp_path: Path) -> None:
    """Of the proxy and of both vLLMs: the prompts of the one that does not come back are the other one's."""
    async with two() as pair:
        async with running_relay(tmp_path, *pair) as relay:
            home, other = await computed_by_one(relay, *pair)
        other.segments, home.segments = dict(home.segments), {}
        other.on_disk = set(other.segments)
        async with running_relay(tmp_path, *pair) as relay:
            await relay.chat("Oslo")
            assert other.tickets[-1].copies
            assert relay.num_nodes == 2
