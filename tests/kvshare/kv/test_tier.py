"""What a table of segments counts, and the tier that claims to hold everything."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest

from delta_tree import SegmentId
from kvshare.kv.tier import EverySegment, SegmentTable


@dataclass(frozen=True)
class Entry:
    num_bytes: int


def held(table: SegmentTable[Entry]) -> list[int]:
    return list(table._entries)


def test_a_table_counts_what_it_holds() -> None:
    """It drops nothing by itself, whatever its limit: its caller has made room."""
    table = SegmentTable[Entry](10)
    for number in range(3):
        table.add(SegmentId(number), Entry(5))
    assert (len(table), table.num_bytes, table.max_bytes) == (3, 15, 10)
    assert table.budgets == (table,)
    assert SegmentId(2) in table
    assert SegmentId(3) not in table
    assert "2" not in table


def test_an_id_is_one_segment() -> None:
    """A second entry changes neither the first one nor the count."""
    table = SegmentTable[Entry](10)
    table.add(SegmentId(1), Entry(5))
    with pytest.raises(ValueError, match="segment 1 is already held"):
        table.add(SegmentId(1), Entry(7))
    assert table.num_bytes == 5


def test_what_is_dropped_is_named_once() -> None:
    """In the order that was asked for; what is not held is passed over."""
    table = SegmentTable[Entry](100)
    for number in range(4):
        table.add(SegmentId(number), Entry(number))
    assert table.drop(SegmentId(number) for number in (3, 9, 1, 3)) == [3, 1]
    assert (held(table), table.num_bytes) == ([0, 2], 2)
    assert table.drop([SegmentId(3)]) == []


def test_threads_leave_no_byte_behind() -> None:
    """Each adds and drops its own; one is dropped by all, and freed once."""
    table = SegmentTable[Entry](10**9)
    shared = [SegmentId(10**6 + number) for number in range(200)]
    for segment_id in shared:
        table.add(segment_id, Entry(3))
    freed: list[SegmentId] = []
    begin = threading.Barrier(4)

    def work(first: int) -> None:
        begin.wait(60)
        for number in range(first, first + 200):
            table.add(SegmentId(number), Entry(7))
            freed.extend(table.drop([SegmentId(number), shared[number - first]]))

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (len(table), table.num_bytes) == (0, 0)
    assert len(freed) == len(set(freed)) == 1000


def test_a_tier_that_has_all_has_nothing_to_give() -> None:
    """For plans that are not carried out."""
    tier = EverySegment()
    fetched = tier.fetch([SegmentId(1)], within_s=0.0)
    assert (fetched.segments, fetched.missing, fetched.late) == ({}, frozenset(), frozenset())
    tier.drop([SegmentId(1)])
    assert SegmentId(1) in tier
    assert SegmentId(1) not in tier.on_disk
    assert tier.num_bytes == 0
