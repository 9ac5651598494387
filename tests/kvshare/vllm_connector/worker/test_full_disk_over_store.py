"""A full disk above a shared store, and a store that is away: what is written all the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delta_tree import Segment, SegmentId
from kvshare.tiers.shared_segments import SegmentNews
from tests.kvshare.vllm_connector.worker.disk_worker import DiskWorker
from tests.kvshare.vllm_connector.worker.small_worker import one_rank
from tests.redis_server import RedisServer, needs_redis, redis_at

pytestmark = needs_redis

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


def announced(worker: DiskWorker) -> list[Segment]:
    """All that was written with this worker's key."""
    found: list[Segment] = []
    SegmentNews(worker.shared.store).take(found.extend)
    return found


def values(server: RedisServer) -> list[bytes]:
    return [bytes(key) for key in server.client().keys("kvshare1:*:o:*")]


def bytes_of_one(tmp_path: Path) -> int:
    """On disk."""
    probe = DiskWorker(tmp_path / "probe")
    probe.save(1)
    probe.wait_written(1)
    one = probe.disk.num_bytes
    probe.close()
    return one


def keys_of(worker: DiskWorker, *numbers: int) -> set[bytes]:
    """The names of their values, as announced."""
    store = worker.shared.store
    return {store.segment_key(each).encode() for each in announced(worker) if each.segment_id in numbers}


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_disk_that_was_full_at_the_start_makes_way(
    server: RedisServer, tmp_path: Path, is_shared: bool
) -> None:
    """Of an earlier process: the store has what was on it, or gets it; nothing of it is lost."""
    one, chosen = bytes_of_one(tmp_path), server.settings()
    before = DiskWorker(tmp_path / "kv", shared=chosen if is_shared else None, max_disk_bytes=2 * one)
    before.save(1, 2)
    before.wait_written(1, 2)
    before.close()
    worker = DiskWorker(tmp_path / "kv", shared=chosen, max_disk_bytes=2 * one)
    worker.save(3)
    worker.wait_written(3)
    assert set(worker.disk.ids()) in ({1, 3}, {2, 3})
    (gone,) = {1, 2} - set(worker.disk.ids())
    assert keys_of(worker, gone, 3) <= set(values(server))
    worker.step(evictions=(SegmentId(3),))
    assert [worker.load(number)[1] for number in (1, 2, 3)] == [1, 2, 3]
    assert worker.problems in ([None], [])
    worker.close()


def test_a_store_that_was_away_until_the_disk_was_full(server: RedisServer, tmp_path: Path) -> None:
    """Nothing is written then; as soon as it is back it gets the oldest, and the disk has room."""
    one = bytes_of_one(tmp_path)
    worker = DiskWorker(tmp_path / "kv", shared=server.settings(timeout_s=0.2), max_disk_bytes=2 * one)
    server.kill()
    worker.save(1, 2)
    worker.wait_written(1, 2)
    worker.save(3)
    until = time.monotonic() + WAIT_S
    while worker.store._problem.reason is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert set(worker.disk.ids()) == {1, 2}
    again = server.again()
    try:
        worker.shared.store.breaker._until = 0.0  # as if its pause were over
        worker.wait_written(3, within_s=WAIT_S)
        assert len(worker.disk) == 2
        assert {1, 3} <= {each.segment_id for each in announced(worker)}
        worker.close()
    finally:
        again.kill()


def test_a_store_takes_what_a_full_device_does_not(server: RedisServer, tmp_path: Path) -> None:
    """As a vLLM without a disk has it written."""
    worker = DiskWorker(tmp_path / "kv", shared=server.settings())
    worker.disk._keep_free_bytes = 1 << 62
    worker.save(1)
    worker.wait_written(1)
    assert len(worker.disk) == 0
    worker.step(evictions=(SegmentId(1),))
    assert worker.load(1)[1] == 1
    worker.close()


def test_a_store_that_is_away_is_not_prepared_for_in_each_step(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each write is tried again after some time, whatever else is done."""
    from kvshare.vllm_connector.worker import disk_store

    monkeypatch.setattr(disk_store, "_PAUSE_S", 3600.0)
    prepared: list[int] = []
    real = disk_store._rows

    def counted(stored: Any) -> Any:
        prepared.append(1)
        return real(stored)

    monkeypatch.setattr(disk_store, "_rows", counted)
    worker = DiskWorker(None, shared=server.settings(timeout_s=0.2))
    server.kill()
    worker.save(1)
    until = time.monotonic() + WAIT_S
    while worker.store._problem.reason is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    for _ in range(50):
        worker.step()
        time.sleep(0.01)
    assert len(prepared) == 1
    worker.close()


def test_a_full_disk_leaves_what_the_store_has(server: RedisServer, tmp_path: Path) -> None:
    """The oldest first; all of it can still be loaded."""
    one = bytes_of_one(tmp_path)
    worker = DiskWorker(tmp_path / "kv", shared=server.settings(), max_disk_bytes=2 * one)
    for number in (1, 2, 3):
        worker.save(number)
        worker.wait_written(number)
    assert worker.disk.ids() == [2, 3]
    worker.step(evictions=tuple(SegmentId(number) for number in (1, 2, 3)))
    assert [worker.load(number)[1] for number in (1, 2, 3)] == [1, 2, 3]
    assert worker.shared.counts["read"] == 1
    worker.close()
