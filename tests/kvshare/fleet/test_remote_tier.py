"""Which replica holds which segment, what each is to drop, and the bytes of each."""

from __future__ import annotations

import threading

import pytest

from delta_tree import SegmentId
from kvshare.fleet.remote_tier import RemoteTier

ONE, TWO, THREE = (SegmentId(number) for number in (1, 2, 3))


@pytest.fixture
def tier() -> RemoteTier:
    """a holds 1 and 2, b holds 2 and 3."""
    tier = RemoteTier("ab")
    tier.add("a", {ONE: 10, TWO: 20})
    tier.add("b", {TWO: 20, THREE: 30})
    return tier


def test_each_replica_is_charged_for_what_it_holds(tier: RemoteTier) -> None:
    """A segment of two counts at both; in all, it takes room at both, too."""
    assert (tier.memories["a"].num_bytes, tier.memories["b"].num_bytes, tier.num_bytes) == (30, 50, 80)
    assert tier.held_by("a") == {ONE, TWO}
    assert tier.held_by("b") == {TWO, THREE}
    assert ONE in tier
    assert ONE not in tier.memories["b"]
    assert SegmentId(7) not in tier


def test_what_is_reported_again_is_charged_once(tier: RemoteTier) -> None:
    """With the bytes of the last report: those of a listing are not known."""
    tier.add("a", {ONE: 0})
    assert tier.memories["a"].num_bytes == 20
    tier.add("a", {ONE: 15})
    assert tier.memories["a"].num_bytes == 35
    assert len(tier.memories["a"].segments) == 2


def test_what_one_has_dropped_the_other_still_holds(tier: RemoteTier) -> None:
    """Nothing is sent for it; what nobody knows changes nothing."""
    tier.forget([TWO, SegmentId(7)], replica="a")
    assert (tier.memories["a"].num_bytes, tier.memories["b"].num_bytes) == (10, 50)
    assert TWO in tier
    tier.forget([TWO, THREE])
    assert (tier.memories["a"].num_bytes, tier.memories["b"].num_bytes) == (10, 0)
    assert TWO not in tier
    assert tier.take_dropped("a") == tier.take_dropped("b") == []


def test_a_drop_is_for_each_that_holds_it(tier: RemoteTier) -> None:
    """Each of those is called for once, whatever the number of its segments; and takes them once."""
    called: list[str] = []
    tier.call_on_drop(called.append)
    tier.drop([ONE, TWO, SegmentId(7)])
    assert sorted(called) == ["a", "b"]
    assert (tier.take_dropped("a"), tier.take_dropped("b")) == ([ONE, TWO], [TWO])
    assert (tier.take_dropped("a"), tier.take_dropped("b")) == ([], [])
    assert tier.num_bytes == 30
    tier.drop([ONE, TWO])
    assert len(called) == 2


def test_an_orphan_is_dropped_by_one_only(tier: RemoteTier) -> None:
    """In a list of its own, as the store is to keep it; nothing is sent for what is not held."""
    called: list[str] = []
    tier.call_on_drop(called.append)
    tier.drop_orphans("a", [TWO, THREE])
    assert called == ["a"]
    assert (tier.take_orphans("a"), tier.take_dropped("a"), tier.take_orphans("b")) == ([TWO], [], [])
    assert TWO in tier
    tier.drop_orphans("a", [TWO, THREE])
    assert called == ["a"]


def test_what_could_not_be_sent_waits_with_what_came_since(tier: RemoteTier) -> None:
    """Of both kinds."""
    tier.drop([ONE])
    tier.drop_orphans("b", [THREE])
    dropped, orphans = tier.take_dropped("a"), tier.take_orphans("b")
    tier.drop([TWO])
    tier.drop_again("a", dropped)
    tier.orphans_again("b", orphans)
    assert sorted(tier.take_dropped("a")) == [ONE, TWO]
    assert tier.take_orphans("b") == [THREE]


def test_who_is_not_called_any_more_has_its_drops_all_the_same(tier: RemoteTier) -> None:
    """After the end of the reconciler; the next run sends them."""
    called: list[str] = []
    tier.call_on_drop(called.append)
    tier.call_on_drop(None)
    tier.drop([ONE])
    assert called == []
    assert tier.take_dropped("a") == [ONE]


def test_a_segment_is_where_it_was_reported_last(tier: RemoteTier) -> None:
    """On some disk, while it is on any; what is dropped is on none."""
    tier.note_places("a", on_disk=[ONE, TWO])
    tier.note_places("b", on_disk=[TWO])
    assert [entry in tier.on_disk for entry in (ONE, TWO, THREE)] == [True, True, False]
    tier.note_places("a", in_memory=[ONE, TWO])
    assert [entry in tier.on_disk for entry in (ONE, TWO, THREE)] == [False, True, False]
    tier.note_places("a", on_disk=[ONE], in_memory=[ONE])  # it was read, and evicted from memory again
    assert ONE in tier.on_disk
    tier.drop([ONE])
    tier.forget([TWO], replica="b")
    assert [entry in tier.on_disk for entry in (ONE, TWO)] == [False, False]


def test_a_place_may_be_known_before_what_is_there(tier: RemoteTier) -> None:
    """Journals say where a segment is before its prompt is reported."""
    tier.note_places("a", on_disk=[SegmentId(9)])
    tier.add("a", {SegmentId(9): 5})
    assert SegmentId(9) in tier.memories["a"].on_disk


def test_no_byte_is_fetched(tier: RemoteTier) -> None:
    """Only what is missing everywhere is said."""
    fetched = tier.fetch([ONE, THREE, SegmentId(7)], within_s=0.0)
    assert fetched.segments == {}
    assert fetched.missing == {7}


def test_reports_and_drops_of_several_threads_leave_no_byte_behind() -> None:
    """Each thread has its own segments at the same replica; nothing is lost or sent twice."""
    tier = RemoteTier("a")
    taken: list[SegmentId] = []
    begin = threading.Barrier(4)

    def work(first: int) -> None:
        begin.wait(60)
        for number in range(first, first + 300):
            tier.add("a", {SegmentId(number): 7})
            tier.note_places("a", on_disk=[SegmentId(number)])
            tier.drop([SegmentId(number)])
            taken.extend(tier.take_dropped("a"))

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    taken.extend(tier.take_dropped("a"))
    assert sorted(taken) == [number + 1000 * first for first in range(4) for number in range(300)]
    assert (tier.num_bytes, tier.held_by("a"), tier.memories["a"].on_disk) == (0, frozenset(), set())
