"""Memory above a disk: what is in which, what is late, and what happens while the disk cannot be written."""

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from delta_tree import SegmentId
from kvshare.kv.tier import Fetched
from kvshare.tiers.files import Files
from kvshare.tiers.tier_stack import TierStack
from tests.kvshare.tiers.faulty_files import FaultyFiles, WaitingFiles
from tests.kvshare.tiers.stored import disk_at, only_file, segment

ONE = segment(1)[0].num_bytes
FAST = 1e12


@contextmanager
def stack_at(
    folder: Path, *, num_in_memory: int = 10, files: Files | None = None, rate: float = FAST, **disk: Any
) -> Iterator[TierStack]:
    stack = TierStack(num_in_memory * ONE, disk_at(folder, files=files, **disk), write_bytes_per_s=rate)
    try:
        yield stack
    finally:
        stack.close()


def put(stack: TierStack, *numbers: int) -> None:
    for number in numbers:
        stack.put(*segment(number))


def settle(stack: TierStack) -> None:
    """Until all is written."""
    until = time.monotonic() + 60
    while stack.status()[1].num_due_bytes:
        assert time.monotonic() < until
        time.sleep(0.002)


def ids(*numbers: int) -> list[SegmentId]:
    return [SegmentId(number) for number in numbers]


def is_whole(fetched: Fetched, *numbers: int) -> bool:
    kv = {SegmentId(number): segment(number)[1] for number in numbers}
    return fetched.segments.keys() == kv.keys() and all(
        fetched.segments[each].computed_checksum() == kv[each].checksum() for each in kv
    )


def test_what_leaves_memory_is_read_from_disk(tmp_path: Path) -> None:
    """That used longest ago leaves first; what is read is in memory again, and nothing is lost."""
    with stack_at(tmp_path, num_in_memory=2) as stack:
        for number in (1, 2, 3):
            put(stack, number)
            settle(stack)
        assert ([each in stack.on_disk for each in ids(1, 2, 3)], stack.num_bytes) == (
            [True, False, False],
            2 * ONE,
        )
        fetched = stack.fetch(ids(1, 3))
        assert is_whole(fetched, 1, 3)
        assert (fetched.read_bytes, fetched.missing) == (ONE, frozenset())
        assert [each in stack.on_disk for each in ids(1, 2, 3)] == [False, True, False]
        memory, disk = stack.status()
        assert (memory.num_hits, disk.num_hits, disk.num_segments) == (1, 1, 3)


def test_it_survives_a_stop(tmp_path: Path) -> None:
    """What is not written yet is written when the process ends, however slowly it was before."""
    with stack_at(tmp_path, rate=1.0) as stack:
        put(stack, *range(1, 9))
    disk = disk_at(tmp_path)
    assert disk.whole(segment(number)[0] for number in range(1, 9)) == frozenset(ids(*range(1, 9)))


def test_writing_is_as_slow_as_it_is_set(tmp_path: Path) -> None:
    """Requests are never in its way, and it is never in theirs."""
    with stack_at(tmp_path, rate=ONE / 0.2) as stack:
        began = time.monotonic()
        put(stack, *range(1, 6))
        settle(stack)
        assert stack.status()[1].num_written == 5
        assert time.monotonic() - began > 0.75  # four pauses; a busy machine takes longer


def test_what_is_dropped_is_in_no_tier(tmp_path: Path) -> None:
    """In memory, on disk, waiting to be written, and while it is written."""
    files = WaitingFiles()
    with stack_at(tmp_path, files=files) as stack:
        put(stack, 1)
        settle(stack)
        files.may_write.clear()
        put(stack, 2, 3)
        time.sleep(0.05)  # 2 is being written
        stack.drop(ids(1, 2, 3, 9))
        files.may_write.set()
        put(stack, 4)
        settle(stack)
        assert only_file(tmp_path).name == f"{4:016x}.kv"
        assert (len(stack.below), stack.num_bytes, stack.below.num_bytes) == (1, ONE, ONE)
        assert stack.fetch(ids(1, 2, 3)).missing == frozenset(ids(1, 2, 3))


def test_a_segment_is_never_overwritten(tmp_path: Path) -> None:
    """Neither in memory nor on disk."""
    with stack_at(tmp_path, num_in_memory=1) as stack:
        put(stack, 1)
        settle(stack)
        put(stack, 2)
        for number in (1, 2):
            with pytest.raises(ValueError, match="already held"):
                put(stack, number)


def test_a_slow_read_is_late_and_harms_nothing(tmp_path: Path) -> None:
    """It is not waited for, it is not missing, and what comes later is in memory for the next request."""
    files = WaitingFiles()
    with stack_at(tmp_path, num_in_memory=1, files=files) as stack:
        put(stack, 1)
        settle(stack)
        put(stack, 2)
        settle(stack)
        files.may_read.clear()
        began = time.monotonic()
        fetched = stack.fetch(ids(1, 2), within_s=0.05)
        assert time.monotonic() - began < 60
        assert (fetched.late, fetched.missing) == (frozenset(ids(1)), frozenset())
        assert is_whole(fetched, 2)
        files.may_read.set()
        until = time.monotonic() + 60
        while SegmentId(1) in stack.on_disk and time.monotonic() < until:
            time.sleep(0.002)
        assert is_whole(stack.fetch(ids(1)), 1)


def test_a_fetch_can_begin_without_waiting(tmp_path: Path) -> None:
    """What is in memory is there at once; the rest comes, or is late, or is cancelled, which is not slow."""
    files = WaitingFiles()
    with stack_at(tmp_path, num_in_memory=1, files=files) as stack:
        for number in (1, 2, 3):
            put(stack, number)
            settle(stack)
        files.may_read.clear()
        begun = [stack.begin(ids(number, 3, 9), within_s=600.0, doubt_s=600.0) for number in (1, 1, 2)]
        assert all(is_whole(each, 3) and each.missing == frozenset(ids(9)) for each in begun)
        first, second, third = (each.reads for each in begun)
        assert first is not None
        assert second is not None
        assert third is not None
        assert not first.wait(0.01)
        for _ in range(5):
            second.cancel()
        late = third.end()
        assert (late.late, late.is_slow, late.missing) == (frozenset(ids(2)), True, frozenset(ids(9)))
        files.may_read.set()
        assert first.wait(60.0)
        found = first.end()
        assert is_whole(found, 1, 3)
        assert (found.late, found.is_slow, found.read_bytes) == (frozenset(), False, ONE)
        assert stack.status()[1].num_late == 1


def test_a_disk_that_is_late_again_and_again_is_left_alone(tmp_path: Path) -> None:
    """Then nothing is waited for at all, for a while."""
    files = WaitingFiles()
    with stack_at(tmp_path, num_in_memory=1, files=files) as stack:
        for number in range(1, 6):
            put(stack, number)
            settle(stack)
        files.may_read.clear()
        for number in (1, 2, 3):
            assert stack.fetch(ids(number), within_s=0.02).late
        began = time.monotonic()
        assert stack.fetch(ids(4), within_s=600.0).late
        assert time.monotonic() - began < 60
        files.may_read.set()


def test_a_full_disk_is_tried_again(tmp_path: Path) -> None:
    """Meanwhile all is in memory, and evictions are for memory only; then what waited is written."""
    state = {"number": errno.ENOSPC}
    files = FaultyFiles(lambda name: state.get("number") if name == "write" else None)
    with stack_at(tmp_path, files=files) as stack:
        put(stack, 1, 2)
        until = time.monotonic() + 60
        while stack.status()[1].problem is None and time.monotonic() < until:
            time.sleep(0.002)
        assert stack.status()[1].problem == "No space left on device"
        assert [budget.num_bytes for budget in stack.budgets] == [2 * ONE]
        assert is_whole(stack.fetch(ids(1, 2)), 1, 2)
        state.clear()
        settle(stack)
        assert stack.status()[1].problem is None
        assert [budget.num_bytes for budget in stack.budgets] == [0, 2 * ONE]


def test_what_is_damaged_in_memory_comes_from_disk(tmp_path: Path) -> None:
    """And what was damaged before it was written is not written."""
    files = WaitingFiles()
    with stack_at(tmp_path, files=files) as stack:
        put(stack, 1)
        settle(stack)
        stack.fetch(ids(1)).segments[SegmentId(1)].planes[0][0, 0, 0, 0] += 1
        assert is_whole(stack.fetch(ids(1)), 1)
        files.may_write.clear()
        put(stack, 2, 3)
        time.sleep(0.05)
        stack.fetch(ids(3)).segments[SegmentId(3)].planes[1][1, 2, 0, 0] += 1
        files.may_write.set()
        settle(stack)
        assert stack.fetch(ids(3)).missing == frozenset(ids(3))
        assert (SegmentId(2) in stack.below, SegmentId(3) in stack.below) == (True, False)


def test_a_damaged_object_is_missing_and_counted(tmp_path: Path) -> None:
    """It is no longer in any tier."""
    with stack_at(tmp_path, num_in_memory=1) as stack:
        put(stack, 1)
        settle(stack)
        path = only_file(tmp_path)
        put(stack, 2)
        settle(stack)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        fetched = stack.fetch(ids(1))
        assert (fetched.missing, fetched.late, fetched.read_bytes) == (frozenset(ids(1)), frozenset(), 0)
        assert SegmentId(1) not in stack
        assert stack.status()[1].num_dropped == 1


def test_one_that_cannot_be_written_keeps_no_other_from_it(tmp_path: Path) -> None:
    class OneFails(Files):
        def create(self, path: Path) -> int:
            if f"{1:016x}" in str(path):
                raise OSError(errno.EIO, "no")
            return super().create(path)

    with stack_at(tmp_path, files=OneFails()) as stack:
        put(stack, 1, 2, 3)
        until = time.monotonic() + 60
        while len(stack.below) < 2:
            assert time.monotonic() < until
            time.sleep(0.01)
        assert [each in stack.below for each in ids(1, 2, 3)] == [False, True, True]
