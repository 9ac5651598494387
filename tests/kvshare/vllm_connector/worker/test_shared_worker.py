"""A shared store below a worker's memory, with and without a disk: what others read, and never load."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from delta_tree import Segment, SegmentId
from kvshare.tiers.shared_segments import SegmentNews
from tests.kvshare.vllm_connector.worker.disk_worker import DiskWorker
from tests.kvshare.vllm_connector.worker.small_worker import NUM_TOKENS, one_rank
from tests.redis_server import RedisServer, needs_redis, redis_at

pytestmark = needs_redis

ONE = frozenset([SegmentId(1)])
COMPUTED = 0.5  # the first row of what the worker computes
KEY, OTHER_KEY = "ab" * 32, "cd" * 32
WAIT_S = 60.0


@pytest.fixture(autouse=True)
def single_rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_at(folder) as started:
        yield started


def settings(server: RedisServer, *, key: str | None = None, **given: Any) -> Any:
    if key is not None:
        file = server.folder / f"key-{key[:2]}"
        file.write_text(key)
        given["seal_key_file"] = str(file)
    return server.settings(**given)


def announced(worker: DiskWorker) -> list[Segment]:
    """All that was written with this worker's key."""
    return SegmentNews(worker.shared.store).page() or []


def written(folder: Path | None, server: RedisServer, *numbers: int, **given: Any) -> list[Segment]:
    """By a worker that has ended. Returns what others know of it."""
    worker = DiskWorker(folder, shared=settings(server, **given))
    worker.save(*numbers)
    worker.wait_written(*numbers)
    known = announced(worker)
    worker.close()
    return known


def values(server: RedisServer) -> list[bytes]:
    return [bytes(key) for key in server.client().keys("kvshare1:*:o:*")]


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("has_disk", [False, True])
def test_another_worker_loads_what_one_has_written(
    server: RedisServer, tmp_path: Path, key: str | None, has_disk: bool
) -> None:
    """Without its disk, too. The second load is from memory."""
    known = written(tmp_path / "a" if has_disk else None, server, 1, 2, 3, key=key)
    assert {(each.segment_id, each.namespace, each.num_tokens) for each in known} == {
        (number, "n", NUM_TOKENS) for number in (1, 2, 3)
    }
    other = DiskWorker(tmp_path / "b" if has_disk else None, shared=settings(server, key=key))
    for number in (1, 2, 3, 2):
        result, value = other.load(number, shared=known)
        assert (result.unreadable, value) == (frozenset(), number)
    assert other.shared.counts["read"] == 3
    other.close()


def test_what_nobody_told_of_is_computed(server: RedisServer) -> None:
    """The value is there, and the worker does not look for it."""
    written(None, server, 1)
    other = DiskWorker(None, shared=settings(server))
    result, value = other.load(1)
    assert (value, result.unreadable) == (COMPUTED, ONE)
    other.close()


def change(server: RedisServer) -> None:
    (name,) = values(server)
    raw = bytearray(server.client().get(name))
    raw[-5] ^= 1
    server.client().set(name, bytes(raw))


def cut(server: RedisServer) -> None:
    (name,) = values(server)
    server.client().set(name, server.client().get(name)[:-1])


def lose(server: RedisServer) -> None:
    server.client().flushall()


@pytest.mark.parametrize("key", [None, KEY])
@pytest.mark.parametrize("spoil", [change, cut, lose])
def test_what_is_not_the_segment_is_never_loaded(
    server: RedisServer, spoil: Callable[[RedisServer], None], key: str | None
) -> None:
    """Changed, cut or lost: it is computed, and reported as gone."""
    known = written(None, server, 1, key=key)
    spoil(server)
    other = DiskWorker(None, shared=settings(server, key=key))
    result, value = other.load(1, shared=known)
    assert (value, result.unreadable, result.late) == (COMPUTED, ONE, frozenset())
    assert len(other.shared) == 0
    other.close()


def test_another_key_reads_nothing(server: RedisServer) -> None:
    """Neither what was announced nor, if somebody told it, what was written; nor does one without a key."""
    known = written(None, server, 1, key=KEY)
    for key in (OTHER_KEY, None):
        other = DiskWorker(None, shared=settings(server, key=key))
        assert announced(other) == []
        result, value = other.load(1, shared=known)
        assert (value, result.unreadable) == (COMPUTED, ONE)
        other.close()


def test_another_segment_of_this_id_is_not_loaded(server: RedisServer) -> None:
    """Of another namespace, or of another length."""
    (known,) = written(None, server, 1)
    foreign = Segment(known.segment_id, "m", 0, known.num_tokens, 0, known.num_bytes, known.checksum)
    other = DiskWorker(None, shared=settings(server))
    assert other.load(1, shared=[foreign])[1] == COMPUTED
    other.close()


def test_a_store_that_hangs_is_not_waited_for(server: RedisServer, tmp_path: Path) -> None:
    """The deadline of the load holds; what is on disk is read meanwhile, and the store's when it goes on."""
    known = written(None, server, 1)
    worker = DiskWorker(tmp_path / "kv", shared=settings(server, timeout_s=WAIT_S))
    worker.save(2)
    worker.wait_written(2)
    worker.step(evictions=(SegmentId(2),))
    server.process.send_signal(signal.SIGSTOP)
    try:
        result, value = worker.load(1, within_s=0.05, shared=known)
        assert (value, result.late, result.unreadable) == (COMPUTED, ONE, ONE)
        result, value = worker.load(2)
        assert (value, result.unreadable) == (2, frozenset())
    finally:
        server.process.send_signal(signal.SIGCONT)
    worker.step(evictions=(SegmentId(1),))
    until = time.monotonic() + WAIT_S
    while worker.store.has_leaving:
        assert time.monotonic() < until
        worker.step()
    assert worker.load(1, shared=known)[1] == 1
    worker.close()


def test_a_store_that_vanishes_costs_what_is_in_it(server: RedisServer, tmp_path: Path) -> None:
    """It is late, not lost; a disk goes on; and what is written later is shared once the store is back."""
    known = written(None, server, 1)
    worker = DiskWorker(tmp_path / "kv", shared=settings(server, timeout_s=0.2))
    server.kill()
    result, value = worker.load(1, shared=known)
    assert (value, result.late) == (COMPUTED, ONE)
    worker.step(evictions=(SegmentId(1),))
    worker.save(2)
    worker.wait_written(2)
    assert SegmentId(2) in worker.disk
    assert SegmentId(2) not in worker.shared
    worker.close()


def test_without_a_disk_writing_is_tried_again(server: RedisServer) -> None:
    """What could not be written stays in memory, and is written when the store is back."""
    worker = DiskWorker(None, shared=settings(server, timeout_s=0.2))
    server.kill()
    worker.save(1, 2)
    until = time.monotonic() + WAIT_S
    while worker.store._problem.reason is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    again = server.again()
    try:
        worker.shared.store.breaker._until = 0.0  # as if its pause were over
        worker.wait_written(1, 2, within_s=WAIT_S)
        assert worker.store._problem.reason is None
        assert {each.segment_id for each in announced(worker)} == {1, 2}
        worker.close()
    finally:
        again.kill()


def test_a_full_disk_leaves_what_the_store_has(server: RedisServer, tmp_path: Path) -> None:
    """The oldest first; all of it can still be loaded."""
    probe = DiskWorker(tmp_path / "probe")
    probe.save(1)
    probe.wait_written(1)
    one = probe.disk.num_bytes
    probe.close()
    worker = DiskWorker(tmp_path / "kv", shared=settings(server), max_disk_bytes=2 * one)
    for number in (1, 2, 3):
        worker.save(number)
        worker.wait_written(number)
    assert worker.disk.ids() == [2, 3]
    worker.step(evictions=tuple(SegmentId(number) for number in (1, 2, 3)))
    assert [worker.load(number)[1] for number in (1, 2, 3)] == [1, 2, 3]
    assert worker.shared.counts["read"] == 1
    worker.close()


def test_new_weights_read_nothing_of_the_old(server: RedisServer) -> None:
    """What others have written stays there, for those that have these weights."""
    known = written(None, server, 1)
    worker = DiskWorker(None, shared=settings(server))
    worker.worker.forget_segments()
    assert worker.load(1, shared=known)[1] == COMPUTED
    assert values(server)
    worker.close()
