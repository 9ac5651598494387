"""The policies of eviction: S3-FIFO step by step, what worth learns, and what holds for all of them."""

from collections.abc import Collection
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import EVICTION_QUEUES, EvictionQueue, NodeId, RecencyQueue, Use
from delta_tree.eviction_order import EvictionOrder
from delta_tree.s3_fifo import S3FifoQueue
from delta_tree.worth_queue import WorthQueue, best_rates, bucket, exposures
from tests.delta_tree.test_eviction_order import node

POLICIES = sorted(EVICTION_QUEUES)


class Cache:
    """So many entries of size 1, in a queue."""

    def __init__(self, queue: EvictionQueue[str], size: int) -> None:
        self.queue, self.size = queue, size
        self.held: set[str] = set()
        self._places = count()

    def ask(self, entry: str) -> bool:
        """Whether it was held; it is afterwards. As in S3-FIFO's paper, room is made before it comes."""
        was_held = entry in self.held
        while not was_held and len(self.held) >= self.size:
            self.evict()
        self.held.add(entry)
        self.queue.use(entry, Use(1.0, next(self._places), 1, name=entry, earlier=(entry,)))
        return was_held

    def evict(self) -> str:
        head = self.queue.first()
        assert head is not None
        self.held.remove(head[1])
        self.queue.remove(head[1], for_room=True)
        return head[1]


def test_s3_fifo_step_by_step() -> None:
    """By hand, with room for four: small is full as soon as it has anything, as a tenth of four is less."""
    queue: S3FifoQueue[str] = S3FifoQueue()
    cache = Cache(queue, 4)
    for entry in "abcd":
        assert not cache.ask(entry)
    assert list(queue._small) == ["a", "b", "c", "d"]
    assert cache.ask("a")
    assert cache.ask("a")
    assert cache.ask("b")  # once: not enough for main
    cache.ask("e")  # a was used twice: to main; b leaves, and is remembered
    assert list(queue._main) == ["a"]
    assert list(queue._small) == ["c", "d", "e"]
    assert list(queue._ghosts) == ["b"]
    cache.ask("b")  # c makes room; b is known: to main at once
    assert list(queue._main) == ["a", "b"]
    assert list(queue._small) == ["d", "e"]
    assert list(queue._ghosts) == ["c"]
    cache.ask("f")
    cache.ask("g")
    assert list(queue._small) == ["f", "g"]
    assert list(queue._ghosts) == ["c", "d", "e"]
    assert cache.ask("a")
    for entry in "fg":
        queue.remove(entry)  # not for room: nothing is remembered
        cache.held.remove(entry)
    assert list(queue._ghosts) == ["c", "d", "e"]
    # Only main is left: a was used, and goes round once more with a use less; so b leaves first.
    assert [cache.evict(), cache.evict()] == ["b", "a"]
    assert len(queue) == 0
    assert queue.first() is None


def test_s3_fifo_withstands_a_scan() -> None:
    """What is asked for again stays, while a thousand others pass by once; least recently used loses it."""

    def hits(queue: EvictionQueue[str]) -> int:
        cache = Cache(queue, 20)
        found = 0
        for number in range(1000):
            found += cache.ask(f"often {number % 5}") if number % 10 < 5 else cache.ask(f"once {number}")
            if number % 100 == 99:
                for other in range(40):
                    cache.ask(f"scan {number} {other}")
        return found

    assert hits(S3FifoQueue()) > hits(RecencyQueue())


def test_worth_keeps_the_kind_that_comes_again() -> None:
    """Of two kinds, long ones come back after ninety others and short ones never. Room is for sixty."""

    def hits(queue: EvictionQueue[str]) -> int:
        places, found, held = count(), 0, dict[str, int]()

        def ask(entry: str, size: int) -> int:
            was_held = entry in held
            held[entry] = size
            queue.use(entry, Use(1.0, next(places), size, name=entry, earlier=(entry,)))
            while len(held) > 60:
                head = queue.first({entry})
                assert head is not None
                del held[head[1]]
                queue.remove(head[1], for_room=True)
            return was_held

        for number in range(6000):
            if number % 3:
                ask(f"short {number}", 10)
            elif (number // 3) % 2:
                ask(f"long {number}", 5000)
            elif number > 90:
                found += ask(f"long {number - 87}", 5000)
        return found

    worth, recency = hits(WorthQueue()), hits(RecencyQueue())
    assert recency == 0
    assert worth > 300


def test_rates_of_use_are_those_of_a_simple_sum() -> None:
    """Against loops over all beginnings and ends."""
    rng = np.random.default_rng(0)
    counted = rng.random((3, 48)) + 0.01
    used = counted * rng.random((3, 48))
    lived = exposures(counted)
    edges = [0.0, *(2.0 ** (n / 2) for n in range(48))]
    for row in range(3):
        for b in (0, 7, 40):
            width, middle = edges[b + 1] - edges[b], (edges[b + 1] - edges[b]) / 2
            assert lived[row, b] == pytest.approx(
                counted[row, b + 1 :].sum() * width + counted[row, b] * middle
            )
        best = best_rates(used[row], lived[row])
        for start in (0, 5, 47):
            rates = [
                used[row, start : end + 1].sum() / lived[row, start : end + 1].sum()
                for end in range(start, 48)
            ]
            assert best[start] == pytest.approx(max(rates))
    assert [bucket(age) for age in (0, 1, 2, 3, 4, 10**9)] == [0, 1, 3, 4, 5, 47]


entries = st.sampled_from("abcdefgh")
steps = st.lists(
    st.one_of(
        st.tuples(st.just("use"), entries),
        st.tuples(st.just("remove"), entries),
        st.tuples(st.just("evict"), st.frozensets(entries, max_size=4)),
    ),
    max_size=80,
)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(taken=steps)
def test_a_queue_names_what_it_holds_and_may_leave(
    policy: str, taken: list[tuple[str, str | Collection[str]]]
) -> None:
    """Whatever happens to it: never one that must stay, and one as long as any may leave."""
    queue: EvictionQueue[str] = EVICTION_QUEUES[policy]()
    held: set[str] = set()
    for place, (what, one) in enumerate(taken):
        if what == "use":
            assert isinstance(one, str)
            queue.use(one, Use(1.0, place, 3, name=one, earlier=(one,)))
            held.add(one)
        elif what == "remove":
            assert isinstance(one, str)
            queue.remove(one)
            held.discard(one)
        else:
            head = queue.first(one)
            assert (head is None) == (not held - set(one))
            if head is not None:
                assert head[1] in held - set(one)
                again = queue.first(one)
                assert again is not None
                assert again[1] == head[1], "asking changes nothing"
                queue.remove(head[1], for_room=True)
                held.remove(head[1])
        assert {entry for entry, _ in queue.entries()} == held
        assert len(queue) == len(held)
        assert all((queue.last_use(entry) is None) == (entry not in held) for entry in "abcdefgh")


def test_a_node_builds_on_its_parent_if_it_has_half_of_it() -> None:
    """And what has left is looked for only by names that are longer than what was found."""
    order = EvictionOrder(WorthQueue)
    parent, child, other = node(1, num_tokens=100), node(2, num_tokens=140), node(3, num_tokens=140)
    order.record_use(parent, origin=lambda: (None, 0))
    order.record_use(child, origin=lambda: (parent, 60))
    order.record_use(other, origin=lambda: (parent, 40))
    first, second, third = (order._queues[None].last_use(NodeId(number)) for number in (1, 2, 3))
    assert first is not None
    assert second is not None
    assert third is not None
    assert (first.depth, second.depth, third.depth) == (1, 2, 1)
    assert len(first.earlier) == 2, "of 64 and of 32 tokens"
    assert len(second.earlier) == 2, "of 128 and of 64"
    assert second.name == second.earlier[0]
    assert first.name == second.earlier[1], "the child continues it"
    order.record_share(NodeId(1), 0.25)
    order.record_use(parent)
    now = order._queues[None].last_use(NodeId(1))
    assert now is not None
    assert now.place == first.place, "a common beginning is no use of all of it"
    order.record_use(parent)
    again = order._queues[None].last_use(NodeId(1))
    assert again is not None
    assert (again.place > first.place, again.depth) == (True, 1)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_group_takes_over_what_its_namespace_has(policy: str) -> None:
    """Also where others of the group were used later."""
    order = EvictionOrder(EVICTION_QUEUES[policy])
    order.record_use(node(1, "a"))
    order.put_into("memory", "b")
    order.record_use(node(2, "b"))
    order.put_into("memory", "a")
    leaving = []
    while (found := order.first(["memory"], ())) is not None:
        leaving.append(found)
        order.age(found, ["memory"])
        order.remove(node(found, "a" if found == 1 else "b"))
    assert sorted(leaving) == [1, 2]
    assert set(order._queues) == {None}


@pytest.mark.parametrize(("is_evicted", "is_shortened"), [(True, False), (True, True), (False, False)])
def test_what_leaves_for_a_tenants_room_is_remembered(is_evicted: bool, is_shortened: bool) -> None:
    """But no floor rises. What was only shortened, and is purged later, did not leave for room."""
    order = EvictionOrder(S3FifoQueue)
    order.record_use(node(1, num_tokens=100), origin=lambda: (None, 0))
    if is_evicted:
        order.age(NodeId(1), None, raises_floor=False)
    if is_shortened:
        order.shorten(NodeId(1), 0.5)
    order.remove(node(1, num_tokens=100))
    assert not order._floors
    queue = order._queues[None]
    assert isinstance(queue, S3FifoQueue)
    assert bool(queue._ghosts) == (is_evicted and not is_shortened)
