"""Which segments are held, which leave, and what the event log remembers. No model."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import SegmentId

if TYPE_CHECKING:
    from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex
    from kvshare.vllm_protocol.messages import Dropped


def segment(num_bytes: int, namespace: str = "a") -> HeldSegment:
    from kvshare.vllm_connector.scheduler.segment_index import HeldSegment

    return HeldSegment(namespace, num_tokens=10, num_bytes=num_bytes)


def index(max_bytes: int, **sizes: int) -> SegmentIndex:
    from kvshare.vllm_connector.scheduler.segment_index import SegmentIndex

    made = SegmentIndex(max_bytes)
    for name, size in sizes.items():
        made.add(SegmentId(int(name[1:])), segment(size))
    return made


def test_least_recently_used_leave_first() -> None:
    """A use counts, and no more leave than must."""
    held = index(100, s1=40, s2=40, s3=20)
    held.touch([SegmentId(1)])
    assert held.make_room(30) == [2]
    assert held.ids() == [3, 1]
    assert held.num_bytes == 60


def test_what_is_needed_stays() -> None:
    """Segments of the prompt that is being retained do not leave for it."""
    held = index(100, s1=40, s2=40, s3=20)
    assert held.make_room(50, in_use=[SegmentId(1)]) == [2, 3]
    assert held.ids() == [1]


def test_nobody_leaves_for_what_cannot_fit() -> None:
    held = index(100, s1=60, s2=40)
    assert held.make_room(101) is None
    assert held.make_room(70, in_use=[SegmentId(1)]) is None
    assert held.ids() == [1, 2]


def test_a_segment_serves_its_namespace_and_its_tokens_only() -> None:
    held = index(100, s1=10)
    assert held.covers(SegmentId(1), "a", end=10)
    assert not held.covers(SegmentId(1), "b", end=10)
    assert not held.covers(SegmentId(1), "a", end=11)
    assert not held.covers(SegmentId(2), "a", end=1)


def test_ids_are_never_reused() -> None:
    held = index(100, s1=10)
    with pytest.raises(ValueError, match="already held"):
        held.add(SegmentId(1), segment(10))
    assert held.num_bytes == 10


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.integers(1, 9)), max_size=40))
def test_bytes_are_always_the_sum_and_within_the_cap(steps: list[tuple[int, int, int]]) -> None:
    """Whatever is added, used, removed: the account is right."""
    held = index(100)
    sizes: dict[int, int] = {}
    for number, (action, size, which) in enumerate(steps):
        if action == 0:
            for gone in held.drop([SegmentId(which)]):
                del sizes[gone]
        elif action == 1:
            held.touch([SegmentId(which)])
        else:
            left = held.make_room(size)
            assert left is not None
            for gone in left:
                del sizes[gone]
            held.add(SegmentId(100 + number), segment(size))
            sizes[100 + number] = size
        assert held.num_bytes == sum(sizes.values()) <= 100
        assert set(held.ids()) == set(sizes)


def event(number: int) -> Dropped:
    from kvshare.vllm_protocol.messages import Dropped

    return Dropped((SegmentId(number),))


def test_a_reader_gets_what_came_after() -> None:
    """Numbers count from 1; reading twice gives the same."""
    from kvshare.vllm_connector.scheduler.event_log import EventLog

    log = EventLog()
    for number in range(1, 6):
        log.append(event(number))
    read = log.read(2)
    assert read.events == (event(3), event(4), event(5))
    assert (read.last, read.gap, log.read(5).events) == (5, False, ())


def test_who_fell_behind_is_told_of_the_gap() -> None:
    """So is a reader that knows more than this log: it speaks of another process."""
    from kvshare.vllm_connector.scheduler.event_log import EventLog

    log = EventLog(max_events=3)
    for number in range(1, 6):
        log.append(event(number))
    assert log.read(1).gap
    assert not log.read(2).gap
    assert log.read(9).gap


def test_a_reader_may_wait() -> None:
    """The wait ends with the first event, or with its time."""
    from kvshare.vllm_connector.scheduler.event_log import EventLog

    log = EventLog()
    assert log.read(0, wait_s=0.05).events == ()
    threading.Timer(0.1, log.append, [event(1)]).start()
    began = time.monotonic()
    assert len(log.read(0, wait_s=600).events) == 1
    assert time.monotonic() - began < 300


def test_what_is_on_disk_leaves_memory_first_and_is_still_held() -> None:
    """Though others were used longer ago. What is only in memory is lost with it, in that order."""
    held = index(100, s1=40, s2=30, s3=30)
    held.disk.max_bytes = 1000
    assert held.note_written([SegmentId(3), SegmentId(2)]) == []
    assert held.make_room(30) == [2]
    assert SegmentId(2) in held
    assert held.only_on_disk() == [2]
    assert held.covers(SegmentId(2), "a", end=10)
    assert held.make_room(90) == [3, 1]
    assert sorted(held.ids()) == [2, 3]


def test_what_is_being_read_stays_in_memory() -> None:
    """Until its load has ended."""
    held = index(100, s1=60)
    held.disk.max_bytes = 1000
    held.note_written([SegmentId(1)])
    assert held.make_room(60) == [1]
    assert held.must_be_read([SegmentId(1)])
    held.begin_read([SegmentId(1)])
    assert held.must_be_read([SegmentId(1)])
    assert held.make_room(60) is None
    held.note_read([SegmentId(1)])
    assert not held.must_be_read([SegmentId(1)])
    assert held.make_room(60) == [1]


def test_a_full_disk_gives_up_what_was_used_longest_ago() -> None:
    """The proxy normally evicts before that."""
    held = index(100, s1=30, s2=30, s3=30)
    held.disk.max_bytes = 70
    held.note_written([SegmentId(1), SegmentId(2)])
    held.touch([SegmentId(1)])
    assert held.note_written([SegmentId(3)]) == [2]


def test_a_dropped_segment_leaves_memory_and_disk() -> None:
    held = index(100, s1=30, s2=30)
    held.disk.max_bytes = 100
    held.note_written([SegmentId(1)])
    held.evict([SegmentId(1)])
    assert held.drop([SegmentId(1), SegmentId(2), SegmentId(3)]) == [2, 1]
    assert held.ids() == []
    assert (held.num_bytes, held.disk.num_bytes) == (0, 0)
