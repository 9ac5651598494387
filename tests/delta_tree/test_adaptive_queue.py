"""The default policy of eviction step by step, and what a use of a part counts for."""

import numpy as np
import pytest

from delta_tree import EvictionQueue, NodeId, RecencyQueue, Use
from delta_tree.adaptive_queue import AdaptiveQueue
from delta_tree.eviction_order import EvictionOrder
from delta_tree.eviction_queue import CopiesQueue
from tests.delta_tree.test_eviction_order import node
from tests.delta_tree.test_eviction_queues import Cache


def test_a_part_counts_until_a_newer_entry_holds_it() -> None:
    """Then the rest is as old as the last use of the whole; a copy for another text is a use of the whole."""
    queue: CopiesQueue[str] = CopiesQueue()
    for place, entry in enumerate("abc"):
        queue.use(entry, Use(1.0, place, 10))
    queue.use("a", Use(1.0, 3, 10, share=0.5))
    queue.use("a", Use(1.0, 4, 10, share=0.9))
    assert leaving(queue) == ["b", "c", "a"], "nobody else holds that part"
    queue.relieve("a")
    queue.relieve("b")  # of which no part was used
    queue.relieve("unknown")
    assert leaving(queue) == ["a", "b", "c"]
    queue.use("a", Use(1.5, 5, 10, copied=0.5, share=0.5))
    queue.relieve("a")
    assert leaving(queue) == ["b", "c", "a"]
    queue.use("b", Use(1.0, 6, 10, share=0.5))
    queue.use("b", Use(1.0, 7, 10))
    queue.relieve("b")
    assert leaving(queue) == ["c", "b", "a"], "the whole was used since"
    queue.use("c", Use(1.0, 8, 10, share=0.5))
    queue.remove("c")
    queue.use("c", Use(1.0, 9, 10))
    queue.relieve("c")
    assert leaving(queue) == ["b", "c", "a"], "it was forgotten with the entry"


def leaving(queue: EvictionQueue[str]) -> list[str]:
    """The order in which entries would leave."""
    found: list[str] = []
    while (head := queue.first(found)) is not None:
        found.append(head[1])
    return found


def test_adaptive_step_by_step() -> None:
    """By hand: without a lead the oldest leaves. What comes back is proven, and says who leaves too early."""
    queue: AdaptiveQueue[str] = AdaptiveQueue()
    cache = Cache(queue, 3)
    for entry in "abca":
        cache.ask(entry)
    assert [entry for entry, _ in queue._proven.entries()] == ["a"]
    cache.ask("d")  # b is the oldest
    assert list(queue._new_ghosts) == ["b"]
    cache.ask("e")  # c is
    cache.ask("f")  # a is older than d, and proven; the lead is 0
    assert (list(queue._new_ghosts), list(queue._proven_ghosts)) == (["b", "c"], ["a"])
    cache.ask("a")  # it comes back, so proven entries leave too early
    assert queue._lead == 4.0
    cache.ask("g")
    assert set(cache.held) == {"a", "f", "g"}, "e was the oldest of the new ones"
    cache.ask("h")
    cache.ask("i")
    assert set(cache.held) == {"a", "h", "i"}, "a is older, but new ones age sixteen times as fast"
    cache.ask("g")  # a new one comes back
    assert queue._lead == 3.0
    assert [entry for entry, _ in queue._proven.entries()] == ["a", "g"]


def test_adaptive_does_not_take_a_common_beginning_for_a_use() -> None:
    """A smaller part than half proves nothing, and what a newer entry holds of it makes it no younger."""
    queue: AdaptiveQueue[str] = AdaptiveQueue()
    for place, entry in enumerate("abc"):
        queue.use(entry, Use(1.0, place, 10, name=entry, earlier=(entry,)))
    queue.use("a", Use(1.0, 3, 10, share=0.4))
    assert leaving(queue) == ["b", "c", "a"]
    queue.relieve("a")
    assert leaving(queue) == ["a", "b", "c"]
    queue.use("a", Use(1.0, 4, 10, share=0.6))
    assert [entry for entry, _ in queue._proven.entries()] == ["a"]
    queue.relieve("a")
    assert leaving(queue) == ["a", "b", "c"], "it stays proven, and is as old as before"
    queue.remove("a", for_room=True)
    assert list(queue._proven_ghosts) == ["a"], "by the name of its first use"


def test_adaptive_prefers_what_was_copied() -> None:
    """One that was copied twice for other texts outlives two turnovers of the others, as with `copies`."""
    queue: AdaptiveQueue[str] = AdaptiveQueue()
    queue.use("a", Use(1.0, 0, 10))
    queue.use("a", Use(3.0, 2, 10, copied=2.0, share=0.1))
    left, floor = list[str](), 0.0
    for place in range(3, 20):
        queue.use(f"b{place}", Use(floor + 1, place, 10))
        if place > 4:
            head = queue.first()
            assert head is not None
            floor = max(floor, head[0].worth)
            queue.remove(head[1], for_room=True)
            left.append(head[1])
    assert left[:7] == ["b3", "b4", "b5", "b6", "b7", "b8", "a"]


def test_without_a_lead_the_order_is_that_of_copies() -> None:
    """Whatever is used, in part or as a whole, copied, relieved and removed. A new entry has no copies."""
    rng = np.random.default_rng(0)
    adaptive: AdaptiveQueue[str] = AdaptiveQueue()
    copies: CopiesQueue[str] = CopiesQueue()
    copied, floor = dict.fromkeys("abcdefgh", 0.0), 0.0
    for place in range(3000):
        entry = "abcdefgh"[rng.integers(8)]
        what = rng.integers(8)
        copied[entry] += 0.4 * (what == 0 and copies.last_use(entry) is not None)
        use = Use(floor + 1 + copied[entry], place, 10, copied=copied[entry], share=(0.3, 0.7, 1.0)[what % 3])
        for queue in (adaptive, copies):
            if what == 1:
                queue.relieve(entry)
            elif what == 2:
                queue.remove(entry)
            else:
                queue.use(entry, use)
        if what == 2:
            copied[entry] = 0.0
        found = [queue.first() for queue in (adaptive, copies)]
        assert [head and head[1] for head in found] == [found[0] and found[0][1]] * 2
        if found[1] is not None and what == 3:
            floor = max(floor, found[1][0].worth)
            adaptive.remove(found[1][1])
            copies.remove(found[1][1])
            copied[found[1][1]] = 0.0
    assert adaptive._lead == 0


@pytest.mark.parametrize("often", [2, 20])
def test_adaptive_withstands_a_scan(often: int) -> None:
    """What is asked for again stays, while others pass by once."""

    def hits(queue: EvictionQueue[str]) -> int:
        cache, found = Cache(queue, 20), 0
        for number in range(3000):
            is_often = number % 40 < 10
            found += cache.ask(f"often {number // 40 % often}" if is_often else f"once {number}")
        return found

    assert hits(AdaptiveQueue()) >= hits(RecencyQueue())


def test_a_loaded_node_has_no_names() -> None:
    """A start with a million prompts does not read their tokens for them."""
    order = EvictionOrder(AdaptiveQueue)
    order.record_use(node(1, num_tokens=100))
    loaded = order._queues[None].last_use(NodeId(1))
    assert loaded is not None
    assert (loaded.name, loaded.earlier) == (None, ())
    order.record_use(node(1, num_tokens=100), origin=lambda: (None, 0))
    assert [entry for entry, _ in order._queues[None].entries()] == [1]
