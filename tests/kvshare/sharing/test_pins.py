"""Pinned prompts stay however full the store is, and may not fill it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import Copy, DeltaTree, Node, NodeId, Span, TokenIds, new_segment_id, token_ids
from kvshare.admin import Evict, Pin, Unpin
from kvshare.errors import RequestError
from kvshare.reasons import Reason
from kvshare.replay.policies.weightless import WeightlessKV, WeightlessSequence, WeightlessTier
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import Estimate

CAPACITY = 1000
MOST = CAPACITY // 2
OURS = "n" * 64
ALONE = NoPlan()


def new_keeper() -> MemoryKeeper[WeightlessKV]:
    """A byte a token."""
    ticks = itertools.count(1)
    tree = DeltaTree.open(None, identity=None, clock=lambda: float(next(ticks)))
    return MemoryKeeper(tree, WeightlessTier(CAPACITY), min_tokens=10, new_id=new_segment_id)


@pytest.fixture
def keeper() -> MemoryKeeper[WeightlessKV]:
    return new_keeper()


def tokens(seed: int, length: int) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(1, 10**6, length).astype(np.int32))


def store(
    keeper: MemoryKeeper[WeightlessKV],
    ids: TokenIds,
    plan: Plan | NoPlan = ALONE,
    namespace: str = OURS,
) -> Node | None:
    return keeper.store(Computed(namespace, ids, plan, WeightlessSequence(1)))


def store_new(keeper: MemoryKeeper[WeightlessKV], seed: int, length: int, namespace: str = OURS) -> Node:
    node = store(keeper, tokens(seed, length), namespace=namespace)
    assert node is not None
    return node


def edited(donor: Node, num_new: int) -> tuple[TokenIds, Plan]:
    """A donor's prompt with another beginning: all behind it is copied."""
    ids = token_ids(np.concatenate([tokens(7, num_new), donor.token_ids[num_new:]]))
    copies = tuple(
        Copy(
            donor.node_id,
            entry,
            offset + skipped,
            size - skipped,
            start + skipped,
            start + skipped,
            start + skipped,
        )
        for start, entry, offset, size in donor.pieces.rows()
        if (skipped := max(0, num_new - start)) < size
    )
    return ids, Plan(len(ids), 0, copies, (Span(0, num_new),), (), 1, Estimate(1.0, 0.5, 0.0))


@given(
    pinned=st.lists(st.integers(10, 250), min_size=1, max_size=4),
    others=st.lists(st.integers(10, CAPACITY), max_size=40),
)
def test_pinned_prompts_stay_and_others_find_room(pinned: list[int], others: list[int]) -> None:
    """
    Whatever else is stored, all that was pinned is whole; what fits into the other half finds room, and only
    what would take pinned ones' place does not.
    """
    keeper = new_keeper()
    nodes = []
    for seed, length in enumerate(pinned):
        node = store_new(keeper, seed, length)
        if keeper.pins()["num_bytes"] + length > MOST:
            with pytest.raises(RequestError, match="may be, half of the memory"):
                keeper.execute(Pin(node=node.node_id))
            break
        keeper.execute(Pin(node=node.node_id))
        nodes.append(node)
    num_pinned = keeper.pins()["num_bytes"]
    for seed, length in enumerate(others):
        stored = store(keeper, tokens(1000 + seed, length))
        assert (stored is not None) == (length + num_pinned <= CAPACITY)
        assert keeper.tier.num_bytes <= CAPACITY
    for node in nodes:
        assert keeper.tree.node(node.node_id).pinned
        assert keeper.tree.node(node.node_id).pieces == node.pieces
        assert not keeper.tier.fetch(node.pieces.segment_ids).missing


def test_without_a_pin_it_would_have_left(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """The same prompt, in the same traffic."""
    first, second = store_new(keeper, 1, 200), store_new(keeper, 2, 200)
    keeper.execute(Pin(node=first.node_id))
    for seed in range(10, 20):
        store_new(keeper, seed, 300)
    assert keeper.tree.get(first.node_id) is not None
    assert keeper.tree.get(second.node_id) is None
    keeper.execute(Unpin(node=first.node_id))
    for seed in range(20, 30):
        store_new(keeper, seed, 300)
    assert keeper.tree.get(first.node_id) is None


def test_a_namespace_is_pinned_whole_or_not_at_all(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """The refusal says how much would be pinned, is, and may be."""
    for seed in range(3):
        store_new(keeper, seed, 200, namespace="a" * 64)
    other = store_new(keeper, 9, 100, namespace="b" * 64)
    keeper.execute(Pin(node=other.node_id))
    with pytest.raises(
        RequestError, match=r"^node: 700 .* would be pinned, 100 are; at most 500 may be"
    ) as refused:
        keeper.execute(Pin(namespace="aaaa"))
    assert refused.value.code == "too_much_pinned"
    assert keeper.tree.pinned() == {other.node_id}
    assert keeper.pins() == {"num_bytes": 100, "max_bytes": MOST}
    keeper.execute(Evict(node=keeper.tree.nodes("a" * 64)[0].node_id))
    assert keeper.execute(Pin(namespace="aaaa")) == {"num_nodes": 2, "num_bytes": 400}


def test_what_two_pinned_prompts_share_counts_once(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """As it takes memory once; and it stays when only one of them is pinned."""
    donor = store_new(keeper, 1, 400)
    child = store(keeper, *edited(donor, 50))
    assert child is not None
    keeper.execute(Pin(node=child.node_id))
    assert 400 < keeper.pins()["num_bytes"] < 450  # not the segments that only the donor needs
    keeper.execute(Pin(node=donor.node_id))
    assert keeper.pins()["num_bytes"] == 450
    keeper.execute(Unpin(node=donor.node_id))
    for seed in range(10, 20):
        store_new(keeper, seed, 300)
    assert keeper.tree.get(donor.node_id) is None
    assert not keeper.tier.fetch(child.pieces.segment_ids).missing


def test_a_pinned_prompt_may_be_pinned_again(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """Also where no more may be pinned."""
    node = store_new(keeper, 1, MOST)
    for _ in range(2):
        assert keeper.execute(Pin(node=node.node_id))["num_nodes"] == 1
    assert len(keeper.tree.pinned()) == 1


def test_the_same_prompt_again_leaves_the_pin(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """It is the same node, which does not come back into the order of eviction by being used."""
    node = store_new(keeper, 1, 200)
    keeper.execute(Pin(node=node.node_id))
    assert store(keeper, tokens(1, 200)) is None
    keeper.tree.touch(node.node_id, num_copied=100)
    for seed in range(10, 20):
        store_new(keeper, seed, 300)
    assert keeper.tree.node(node.node_id).pinned


def test_a_node_without_its_kv_is_not_pinned(keeper: MemoryKeeper[WeightlessKV]) -> None:
    node = store_new(keeper, 1, 200)
    keeper.tier.drop(node.pieces.segment_ids)
    with pytest.raises(RequestError, match="in no memory now") as refused:
        keeper.execute(Pin(node=node.node_id))
    assert refused.value.code == "kv_not_at_hand"
    assert not keeper.tree.pinned()


def test_dropping_a_namespace_or_everything_drops_what_is_pinned(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """Its memory is free then, and so is its share of what may be pinned."""
    for namespace in ("a" * 64, "b" * 64):
        keeper.execute(Pin(node=store_new(keeper, 1, 200, namespace=namespace).node_id))
    keeper.execute(Evict(namespace="aaaa", dry_run=False))
    assert keeper.pins()["num_bytes"] == 200
    keeper.execute(Evict(all=True, dry_run=False))
    assert (keeper.pins()["num_bytes"], keeper.tier.num_bytes) == (0, 0)


def test_where_others_find_a_prompt(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """At its own node, or at a donor that begins with all of it."""
    donor = store_new(keeper, 1, 200)
    ids, plan = edited(donor, 50)
    assert keeper.find_stored(OURS, donor.token_ids, NoPlan(Reason.OFF)) == donor
    assert keeper.find_stored(OURS, ids, plan) is None
    begun = Plan(100, 99, plan.copies, (Span(99, 100),), (), 0, Estimate(1.0, 0.5, 0.0))
    assert keeper.find_stored(OURS, token_ids(donor.token_ids[:100]), begun) == donor
    assert keeper.find_stored("m" * 64, donor.token_ids, NoPlan(Reason.OFF)) is None


def test_unknown_nodes_are_pinned_by_nobody(keeper: MemoryKeeper[WeightlessKV]) -> None:
    with pytest.raises(RequestError, match="no node 77"):
        keeper.execute(Pin(node=NodeId(77)))
