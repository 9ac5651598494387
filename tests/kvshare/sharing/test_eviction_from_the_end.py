"""Room is made by whole prompts, and by the end of the last of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from delta_tree import (
    SEGMENT_TOKENS,
    Copy,
    DeltaTree,
    Node,
    NodeId,
    SegmentId,
    Span,
    TokenIds,
    segment_tokens,
    token_ids,
)
from kvshare.replay.policies.weightless import WeightlessKV, WeightlessSequence, WeightlessTier
from kvshare.sharing.memory_keeper import Computed, MemoryKeeper
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import Estimate
from kvshare.telemetry import EvictionCause

CAPACITY = 2500
MIN_TOKENS = 300
PART = segment_tokens(CAPACITY)


def new_keeper(capacity: int) -> MemoryKeeper[WeightlessKV]:
    """A byte a token; shorter prompts than `MIN_TOKENS` are not kept."""
    ticks, ids = itertools.count(1), itertools.count(1)
    tree = DeltaTree.open(None, identity=None, clock=lambda: float(next(ticks)))
    return MemoryKeeper(
        tree, WeightlessTier(capacity), min_tokens=MIN_TOKENS, new_id=lambda: SegmentId(next(ids))
    )


@pytest.fixture
def keeper() -> MemoryKeeper[WeightlessKV]:
    return new_keeper(CAPACITY)


def tokens(seed: int, length: int) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(1, 1000, length).astype(np.int32))


def store(
    keeper: MemoryKeeper[WeightlessKV], ids: TokenIds, plan: Plan | NoPlan | None = None, namespace: str = "n"
) -> Node:
    computed = Computed(namespace, ids, plan or NoPlan(), WeightlessSequence(1))
    node = keeper.store(computed)
    assert node is not None
    return node


def continued(donor: Node, num_kept: int, length: int) -> tuple[TokenIds, Plan]:
    """A prompt that begins with `num_kept` tokens of a donor, as a plan has it."""
    copies = tuple(
        Copy(donor.node_id, entry, offset, size, start, start, start)
        for start, entry, offset, size in donor.pieces.first(num_kept).rows()
    )
    ids = token_ids([*donor.token_ids[:num_kept].tolist(), *tokens(99, length - num_kept).tolist()])
    rest = (Span(num_kept, length),)
    return ids, Plan(length, num_kept, copies, rest, (), 0, Estimate(1.0, 0.5, 0.0))


def test_a_long_prompt_is_cut_into_segments(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """The last one has the rest."""
    node = store(keeper, tokens(1, 1000))
    lengths = [keeper.tree.segment(piece.segment_id).num_tokens for piece in node.pieces]
    assert lengths == [PART] * 61 + [1000 - 61 * PART]


def test_a_large_store_has_longer_segments() -> None:
    """What leaves it at once may be more, and there are fewer of them."""
    keeper = new_keeper(200_000)
    node = store(keeper, tokens(1, 1000))
    lengths = [keeper.tree.segment(piece.segment_id).num_tokens for piece in node.pieces]
    assert lengths == [SEGMENT_TOKENS, SEGMENT_TOKENS, 1000 - 2 * SEGMENT_TOKENS]


@pytest.mark.parametrize(
    ("capacity", "length"), [(0, 16), (2500, 16), (8192, 16), (32_768, 64), (131_072, 256), (10**9, 256)]
)
def test_segments_are_a_512th_of_a_store(capacity: int, length: int) -> None:
    assert segment_tokens(capacity) == length


def test_the_last_to_leave_keeps_its_beginning(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """As much of the end goes as is needed; id, order of use and place in the tree stay."""
    first, second = store(keeper, tokens(1, 1000)), store(keeper, tokens(2, 1500))
    store(keeper, tokens(3, 400))
    shorter = keeper.tree.node(first.node_id)
    assert shorter.num_tokens == 37 * PART == 592
    assert np.array_equal(shorter.token_ids, first.token_ids[: shorter.num_tokens])
    assert keeper.tree.next_to_evict() is shorter
    assert keeper.tree.node(second.node_id) is second
    assert keeper.tier.num_bytes == keeper.tree.stats().num_bytes == 592 + 1500 + 400
    assert keeper.take_evicted() == []
    assert keeper.take_shortened() == [shorter]
    assert keeper.take_shortened() == []
    assert keeper.telemetry.counts().evictions == {EvictionCause.END: 1}


def test_an_eighth_of_a_long_prompt_goes_at_least() -> None:
    """What stays is stored and indexed anew: not for each segment."""
    keeper = new_keeper(9000)
    first = store(keeper, tokens(1, 8000))
    store(keeper, tokens(2, 1200))
    assert keeper.tree.node(first.node_id).num_tokens == 411 * segment_tokens(9000) == 6987


def test_what_is_left_leaves_next(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """Below the shortest prompt worth a lookup nothing is left, and the index hears of the eviction only."""
    first = store(keeper, tokens(1, 1000))
    store(keeper, tokens(2, 1500))
    store(keeper, tokens(3, 400))
    store(keeper, tokens(4, 500))
    assert keeper.tree.get(first.node_id) is None
    assert keeper.take_evicted() == [("n", first.node_id)]
    assert keeper.take_shortened() == []
    assert keeper.telemetry.counts().evictions == {EvictionCause.END: 1, EvictionCause.CAPACITY: 1}


def test_a_beginning_that_others_hold_is_no_reason_to_stay(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """All of what would be left is another prompt's, too: the node leaves, the KV does not."""
    donor = store(keeper, tokens(1, 700))
    child = store(keeper, *continued(donor, 2 * SEGMENT_TOKENS - 100, 700))
    store(keeper, tokens(2, 2500 - keeper.tier.num_bytes))
    keeper.tree.touch(child.node_id)
    store(keeper, tokens(3, 300))
    assert keeper.tree.get(donor.node_id) is None
    assert keeper.tree.get(child.node_id) is not None
    assert all(piece.segment_id in keeper.tier for piece in child.pieces)


def test_a_beginning_that_is_a_prompt_already_leaves_whole(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """No namespace has the same prompt twice."""
    long = tokens(1, 1000)
    first = store(keeper, long)
    beginning = store(keeper, token_ids(long[: 37 * PART]))
    store(keeper, tokens(2, 2500 - keeper.tier.num_bytes))
    store(keeper, tokens(3, 400))
    assert keeper.tree.get(first.node_id) is None
    assert keeper.tree.find("n", long[: 37 * PART]) is beginning


def test_a_shortened_prompt_can_become_whole_again(keeper: MemoryKeeper[WeightlessKV]) -> None:
    """Asked again it is a prompt of its own that begins with what was left."""
    long = tokens(1, 1000)
    first = store(keeper, long)
    store(keeper, tokens(2, 1500))
    store(keeper, tokens(3, 400))
    shorter = keeper.tree.node(NodeId(first.node_id))
    ids, plan = continued(shorter, shorter.num_tokens, 1000)
    ids = token_ids([*ids[: shorter.num_tokens].tolist(), *long[shorter.num_tokens :].tolist()])
    keeper.hold(plan)
    again = store(keeper, ids, plan)
    assert again.node_id != first.node_id
    assert keeper.tree.find("n", long) is again
    assert keeper.tree.node(first.node_id) is shorter
