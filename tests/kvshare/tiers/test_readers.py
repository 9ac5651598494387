"""Reads of several tiers: a shared store that hangs, or is slow, keeps no read of the disk waiting."""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from delta_tree import Segment, SegmentId
from kvshare.tiers.disk_and_shared import DiskAndShared
from kvshare.tiers.kv_object import Rows
from kvshare.tiers.lower_tier import BusyError, LowerTier
from kvshare.tiers.readers import TierReaders, result_of
from kvshare.tiers.shared_start import open_shared_tier
from kvshare.tiers.tier_stack import TierStack
from tests.kvshare.tiers.faulty_files import WaitingFiles
from tests.kvshare.tiers.stored import disk_at, form, only_file, segment
from tests.redis_server import RedisServer, needs_redis, redis_at

NUM_SHARED = 9  # more than threads read one tier
WAIT_S = 60.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_at(folder) as started:
        yield started


def where(tier: LowerTier, described: Segment, rows: tuple[Rows, ...]) -> str:
    del described, rows
    return tier.name


@needs_redis
def test_a_store_that_hangs_keeps_no_read_of_the_disk_waiting(server: RedisServer, tmp_path: Path) -> None:
    """More reads of it are waiting than threads read, and the segments on disk are there meanwhile."""
    disk, shared = disk_at(tmp_path / "kv"), open_shared_tier(server.settings(timeout_s=WAIT_S), form())
    both = DiskAndShared(disk, shared)
    near, kv = segment(1)
    disk.write(near, kv.rows())
    far = [segment(number) for number in range(2, 2 + NUM_SHARED)]
    for described, each in far:
        shared.write(described, each.rows())
    stack = TierStack(10**7, both, write_bytes_per_s=1e12)
    server.process.send_signal(signal.SIGSTOP)
    try:
        fetched = stack.fetch([described.segment_id for described, _ in far], within_s=0.0)
        assert fetched.late == {described.segment_id for described, _ in far}
        assert not fetched.is_slow, "the disk was not slow"
        found = stack.fetch([near.segment_id], within_s=WAIT_S / 2)
        assert set(found.segments) == {near.segment_id}
    finally:
        server.process.send_signal(signal.SIGCONT)
    stack.close()


@needs_redis
def test_what_is_damaged_on_disk_is_read_from_the_store(server: RedisServer, tmp_path: Path) -> None:
    disk, shared = disk_at(tmp_path / "kv"), open_shared_tier(server.settings(), form())
    both = DiskAndShared(disk, shared)
    described, kv = segment(1)
    both.write(described, kv.rows())
    path = only_file(tmp_path / "kv")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    readers = TierReaders(both.parts)
    assert readers.read(described.segment_id, where).result(WAIT_S) == "shared"
    readers.close(waits=True)
    shared.close()


def test_a_tier_without_the_segment_is_not_asked(tmp_path: Path) -> None:
    readers = TierReaders([disk_at(tmp_path)])
    assert readers.read(SegmentId(1), where).result(WAIT_S) is None
    readers.close(waits=True)


def test_what_cannot_be_read_now_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So it is late, and not lost."""
    disk = disk_at(tmp_path)
    described, kv = segment(1)
    disk.write(described, kv.rows())

    def busy(segment_id: SegmentId) -> None:
        raise BusyError

    monkeypatch.setattr(disk, "read", busy)
    readers = TierReaders([disk])
    read = readers.read(described.segment_id, where)
    assert isinstance(read.exception(WAIT_S), BusyError)
    assert result_of(read) is None
    readers.close(waits=True)


def test_reads_that_have_not_begun_end_with_the_threads(tmp_path: Path) -> None:
    """Nobody waits for them for ever."""
    files = WaitingFiles()
    disk = disk_at(tmp_path, files=files)
    described, kv = segment(1)
    disk.write(described, kv.rows())
    files.may_read.clear()
    readers = TierReaders([disk])
    reads: list[Future[str | None]] = [readers.read(described.segment_id, where) for _ in range(9)]
    closing = threading.Thread(target=lambda: readers.close(waits=True))
    closing.start()
    until = time.monotonic() + WAIT_S
    while not all(read.done() for read in reads[4:]):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert [result_of(read) for read in reads[4:]] == [None] * 5
    files.may_read.set()
    closing.join(WAIT_S)
    assert [read.result(WAIT_S) for read in reads[:4]] == ["disk"] * 4
