"""Segments that several replicas hold, as they share a store."""

from __future__ import annotations

from delta_tree import Node, new_segment_id
from kvshare.admin import Evict
from kvshare.fleet.replica_keeper import ReplicaKeeper
from tests.kvshare.fleet.reports import offer, prompt, whole


def store(keeper: ReplicaKeeper) -> Node:
    node = offer(keeper, whole(), prompt(1))
    assert node is not None
    return node


def test_what_two_replicas_hold_is_lost_with_the_second(keeper: ReplicaKeeper) -> None:
    """They share a store. Dropping it reaches both."""
    node = store(keeper)
    (segment_id,) = node.pieces.segment_ids
    keeper.adopt("b", {segment_id: 500})
    assert keeper.tier.memories["b"].num_bytes == 500
    keeper.forget([segment_id], "a")
    assert keeper.tree.get(node.node_id) is not None
    keeper.adopt("a", {segment_id: 500})
    keeper.lose("a")
    assert keeper.tree.get(node.node_id) is not None
    keeper.adopt("a", {segment_id: 500})
    keeper.execute(Evict(node=node.node_id))
    assert keeper.tier.take_dropped("a") == keeper.tier.take_dropped("b") == [segment_id]
    assert keeper.tier.num_bytes == 0


def test_the_orphans_of_one_replica_stay_with_others(keeper: ReplicaKeeper) -> None:
    """What a prompt uses is none; what could not be sent is sent later."""
    node = store(keeper)
    (used,) = node.pieces.segment_ids
    unknown = new_segment_id()
    keeper.adopt("a", {unknown: 10})
    keeper.adopt("b", {unknown: 10, used: 500})
    keeper.drop_orphans("b", [unknown, used])
    assert keeper.tier.held_by("b") == {used}
    assert keeper.tier.held_by("a") == {used, unknown}
    assert (keeper.tier.take_dropped("b"), keeper.tier.take_orphans("b")) == ([], [unknown])
    keeper.tier.orphans_again("b", [unknown])
    assert keeper.tier.take_orphans("b") == [unknown]


def test_a_segment_may_be_on_one_disk_and_in_anothers_memory(keeper: ReplicaKeeper) -> None:
    """Each replica's plans price its own place."""
    node = store(keeper)
    (segment_id,) = node.pieces.segment_ids
    keeper.adopt("b", {segment_id: 500})
    keeper.tier.note_places("b", on_disk=[segment_id])
    places = {name: segment_id in memory.on_disk for name, memory in keeper.tier.memories.items()}
    assert places == {"a": False, "b": True}
    assert segment_id in keeper.tier.on_disk
    keeper.tier.note_places("b", in_memory=[segment_id])
    assert segment_id not in keeper.tier.on_disk
