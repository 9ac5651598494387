"""Reads below a worker's memory that come too late: which go on, and which are cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from delta_tree import SegmentId
from tests.kvshare.tiers.faulty_files import WaitingFiles
from tests.kvshare.vllm_connector.worker.disk_worker import DiskWorker
from tests.kvshare.vllm_connector.worker.small_worker import one_rank


@pytest.fixture(autouse=True)
def single_rank() -> Iterator[None]:
    with one_rank():
        yield


def test_late_reads_that_have_not_begun_are_cancelled(tmp_path: Path) -> None:
    """Those of the threads end, the others are not made; the next load of such a segment reads it."""
    numbers = range(1, 7)  # of which four are read at a time
    first = DiskWorker(tmp_path, max_segments=len(numbers))
    first.save(*numbers)
    first.wait_written(*numbers)
    first.close()
    files = WaitingFiles()
    second = DiskWorker(tmp_path, max_segments=len(numbers), files=files)
    files.may_read.clear()
    for number in numbers:
        assert second.load(number, within_s=0.05)[0].late == {SegmentId(number)}
    files.may_read.set()
    while second.store._reads:
        second.step()
    assert second.disk.counts["read"] == 4
    second.step(evictions=(SegmentId(5),))  # as the scheduler side does with what was late
    for number in (5, 6):
        result, value = second.load(number)
        assert (value, result.unreadable) == (number, frozenset())
    assert second.disk.counts["read"] == 6
    second.close()


def test_a_read_that_another_load_waits_for_goes_on() -> None:
    """The one that is late gives up for itself only."""
    from kvshare.vllm_connector.worker.disk_reads import Read

    future: Future[bool | None] = Future()
    read = Read(SegmentId(1), future)
    assert read.wait_for()
    assert read.wait_for()
    read.give_up()
    assert not read.is_over
    read.give_up()
    assert read.is_over
    assert not read.wait_for()


def test_what_is_read_for_a_waiting_request_is_there_for_its_load(tmp_path: Path) -> None:
    """Also if it is under way; if the request leaves, reads that have not begun are cancelled."""
    from kvshare.vllm_connector.metadata import PreloadRequest, Preloads

    numbers = range(1, 7)  # of which four are read at a time
    first = DiskWorker(tmp_path, max_segments=len(numbers))
    first.save(*numbers)
    first.wait_written(*numbers)
    first.close()
    files = WaitingFiles()
    second = DiskWorker(tmp_path, max_segments=len(numbers), files=files)
    second.step(preloads=Preloads((PreloadRequest("l", (SegmentId(1),)),)))
    while second.store._reads:
        second.step()
    assert second.disk.counts["read"] == 1
    files.may_read.clear()
    result, value = second.load(1)
    assert (value, result.unreadable, second.disk.counts["read"]) == (1, frozenset(), 1)
    wanted = tuple(map(SegmentId, numbers[1:]))
    second.step(preloads=Preloads((PreloadRequest("m", wanted),), over=("l",)))
    second.step(preloads=Preloads(over=("m",)), evictions=wanted)
    files.may_read.set()
    while second.store._reads:
        second.step()
    assert second.disk.counts["read"] == 5, "four had begun"
    for number in numbers[1:]:
        result, value = second.load(number)
        assert (value, result.unreadable) == (number, frozenset())
    second.close()
