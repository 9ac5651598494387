"""Memory and disk above a real Redis: whose KV takes room, and what is written again or not left there."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshare.tiers.disk_and_shared import DiskAndShared
from kvshare.tiers.shared_start import open_shared_tier
from kvshare.tiers.shared_tier import SharedTier
from kvshare.tiers.tier_stack import TierStack
from tests.kvshare.tiers.stored import disk_at, form, segment
from tests.redis_server import RedisServer, needs_redis, redis_at

pytestmark = needs_redis


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_at(folder) as started:
        yield started


def tier(server: RedisServer, **settings: object) -> SharedTier:
    return open_shared_tier(server.settings(**settings), form())


def _until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_own_segments_take_none_of_the_room_for_others(server: RedisServer, tmp_path: Path) -> None:
    """Below a disk, which limits them; without one they are in this tier only, and it does."""
    (own, kv), (foreign, _) = segment(1), segment(2)
    shared = tier(server)
    DiskAndShared(disk_at(tmp_path), shared).write(own, kv.rows())
    assert own.segment_id in shared
    assert (shared.num_bytes, shared.takes_room(own.segment_id)) == (0, False)
    shared.adopt([own, foreign])
    assert (shared.num_bytes, shared.takes_room(foreign.segment_id)) == (foreign.num_bytes, True)
    shared.drop([own.segment_id, foreign.segment_id])
    assert shared.num_bytes == 0
    alone = tier(server)
    alone.write(own, kv.rows())
    assert alone.num_bytes == own.num_bytes


def test_what_is_dropped_while_it_is_written_is_not_left_there(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (described, kv), write, is_writing = segment(1), SharedTier.write, threading.Event()

    def noted(*given: Any) -> None:
        is_writing.set()
        write(*given)

    monkeypatch.setattr(SharedTier, "write", noted)
    shared = tier(server, timeout_s=60)
    stack = TierStack(10**6, shared, write_bytes_per_s=1e12)
    server.process.send_signal(signal.SIGSTOP)
    try:
        stack.put(described, kv)
        assert is_writing.wait(60)
        time.sleep(0.5)  # it has been sent
        stack.drop([described.segment_id])
    finally:
        server.process.send_signal(signal.SIGCONT)
    _until(lambda: shared.counts["written"] == 1)
    _until(lambda: not server.client().keys("kvshare1:*:o:*"))
    assert len(shared) == 0
    stack.close()


def test_what_memory_has_is_written_again(server: RedisServer) -> None:
    """Once the store has lost it."""
    described, kv = segment(1)
    shared = tier(server)
    stack = TierStack(10**6, shared, write_bytes_per_s=1e12)
    stack.put(described, kv)
    _until(lambda: described.segment_id in shared)
    server.client().flushall()
    shared.drop([described.segment_id])
    stack.write_again()
    assert stack.status()[1].num_due_bytes in {0, described.num_bytes}
    _until(lambda: described.segment_id in shared)
    assert server.client().keys("kvshare1:*:o:*")
    _until(lambda: stack.status()[1].num_due_bytes == 0)
    stack.close()
