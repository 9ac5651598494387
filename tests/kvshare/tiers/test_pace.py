"""Reads are waited for as long as their pace lets expect them in time."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest

from kvshare.tiers.pace import BytesRead, PacedReads, SlowReads, WaitedReads

LONG_S = 60.0  # no test takes so long
BEFORE = 10**6  # bytes of earlier reads


class Progress(BytesRead):
    """So much is read from the second look on."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number, self._next = BEFORE, BEFORE + number

    def __int__(self) -> int:
        number, self._number = self._number, self._next
        return number


def waited_for(read: Future[Any], **limits: Any) -> WaitedReads:
    reads = PacedReads([read], **limits)
    assert reads.wait()
    return reads.result()


def test_threads_add_up_what_they_read() -> None:
    bytes_read = BytesRead()

    def read() -> None:
        for _ in range(1000):
            bytes_read.add(1)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert int(bytes_read) == 4000


def test_what_is_over_at_once_is_not_looked_at() -> None:
    read: Future[Any] = Future()
    read.set_result(None)
    found = waited_for(read, num_bytes=10, within_s=LONG_S, doubt_s=0.0, bytes_read=BytesRead())
    assert (found.done, found.pending) == ({read}, set())


@pytest.mark.parametrize("progress", [0, 1])
def test_a_slow_read_is_given_up_early(progress: int) -> None:
    """Nothing after some time, or so little that the whole would take longer than is given."""
    read: Future[Any] = Future()
    found = waited_for(read, num_bytes=10**6, within_s=LONG_S, doubt_s=0.05, bytes_read=Progress(progress))
    assert (found.pending, found.num_bytes) == ({read}, progress)
    assert found.seconds < LONG_S / 2


def test_a_read_with_a_good_pace_is_waited_for() -> None:
    """Longer than any is, as it will be in time."""
    read: Future[Any] = Future()
    threading.Timer(0.2, read.set_result, [None]).start()
    found = waited_for(read, num_bytes=100, within_s=LONG_S, doubt_s=0.02, bytes_read=Progress(90))
    assert (found.done, found.num_bytes) == ({read}, 90)


def test_one_that_stops_is_given_up_in_the_end() -> None:
    """Its pace is the worse the longer it stands still; after the time that is given it is late anyway."""
    read: Future[Any] = Future()
    found = waited_for(read, num_bytes=100, within_s=0.4, doubt_s=0.05, bytes_read=Progress(50))
    assert found.pending == {read}


def test_who_does_something_else_meanwhile_looks_in_between() -> None:
    """A look is short. The seconds are those of the reads, however late somebody looks."""
    first, last = Future[Any](), Future[Any]()
    reads = PacedReads([first, last], num_bytes=10, within_s=LONG_S, doubt_s=LONG_S, bytes_read=BytesRead())
    first.set_result(None)
    assert not reads.wait(0.0)
    assert not reads.wait(0.01)
    assert reads.result().pending == {last}
    last.set_result(None)
    time.sleep(0.2)
    assert reads.wait(0.0)
    found = reads.result()
    assert (found.done, found.pending) == ({first, last}, set())
    assert reads._seconds - found.seconds >= 0.2


def test_a_pace_that_is_not_known_is_no_reason_to_give_up() -> None:
    """A shared store's: only the time counts."""
    read: Future[Any] = Future()
    limits: dict[str, Any] = {"num_bytes": 10**6, "doubt_s": 0.0, "bytes_read": Progress(0)}
    assert not PacedReads([read], within_s=LONG_S, has_pace=False, **limits).wait(0.05)
    assert PacedReads([read], within_s=LONG_S, **limits).wait(0.05)
    assert PacedReads([read], within_s=0.01, has_pace=False, **limits).wait(LONG_S)


def test_a_tier_that_is_slow_again_and_again_is_left_alone() -> None:
    """Three plans in a row; one in time in between begins anew."""
    slow = SlowReads()
    for is_slow in (True, True, False, True, True):
        slow.note(is_slow)
        assert not slow.is_paused
    slow.note(True)
    assert slow.is_paused
    assert slow.is_recent
