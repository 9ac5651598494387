"""Files below a worker's memory: what is written, read, late or wrong. The real worker over a small cache."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest

from delta_tree import SegmentId
from tests.kvshare.tiers.faulty_files import FaultyFiles, WaitingFiles
from tests.kvshare.vllm_connector.worker.disk_worker import DiskWorker, SnapshotFiles
from tests.kvshare.vllm_connector.worker.small_worker import NUM_TOKENS, one_rank

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import WorkerHandshake

ONE = frozenset([SegmentId(1)])
COMPUTED = 0.5  # the first row of what the worker computes


@pytest.fixture(autouse=True)
def single_rank() -> Iterator[None]:
    with one_rank():
        yield


def test_another_process_loads_what_was_written(tmp_path: Path) -> None:
    """Each segment with its own rows, and what is said of it; the second load is from memory."""
    first = DiskWorker(tmp_path)
    first.save(1, 2, 3)
    first.wait_written(1, 2, 3)
    first.close()
    second = DiskWorker(tmp_path)
    assert {(each.segment_id, each.namespace, each.num_tokens) for each in second.found} == {
        (number, "n", NUM_TOKENS) for number in (1, 2, 3)
    }
    for number in (1, 2, 3, 2):
        result, value = second.load(number)
        assert (result.unreadable, value) == (frozenset(), number)
    assert second.disk.counts["read"] == 3
    second.close()


def damage(path: Path) -> None:
    """One bit in the middle of its rows."""
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 4
    path.write_bytes(raw)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_another(path: Path) -> None:
    """Of the right size, and whole."""
    shutil.copy(path.parents[1] / "02" / f"{2:016x}.kv", path)


def make_a_folder(path: Path) -> None:
    """Of its name."""
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("spoil", [damage, shorten, replace_by_another, Path.unlink, make_a_folder])
def test_a_file_that_is_not_the_segment_is_never_loaded(
    tmp_path: Path, spoil: Callable[[Path], object]
) -> None:
    """It is computed, reported as gone, and its file is deleted; the other one is loaded."""
    first = DiskWorker(tmp_path)
    first.save(1, 2)
    first.wait_written(1, 2)
    first.close()
    second = DiskWorker(tmp_path)
    spoil(second.path(1))
    result, value = second.load(1)
    assert (value, result.unreadable, result.late) == (COMPUTED, ONE, frozenset())
    assert SegmentId(1) not in second.disk
    second.step(drops=(SegmentId(1),))
    assert second.load(2)[1] == 2
    second.close()


def test_a_disk_that_fails_to_read_is_computed(tmp_path: Path) -> None:
    """Whatever the system says."""
    first = DiskWorker(tmp_path)
    first.save(1)
    first.wait_written(1)
    first.close()
    is_on, files = [False], FaultyFiles(lambda call: errno.EIO if is_on[0] and call == "read" else None)
    second = DiskWorker(tmp_path, files=files)
    is_on[0] = True
    assert second.load(1)[1] == COMPUTED
    second.close()


def test_a_late_read_is_computed_and_stays_on_disk(tmp_path: Path) -> None:
    """Later the same segment is read; its memory was in use as long as the late read."""
    first = DiskWorker(tmp_path)
    first.save(1)
    first.wait_written(1)
    first.close()
    files = WaitingFiles()
    second = DiskWorker(tmp_path, max_segments=1, files=files)
    files.may_read.clear()
    result, value = second.load(1, within_s=0.05)
    assert (value, result.late, result.unreadable) == (COMPUTED, ONE, ONE)
    second.step(evictions=(SegmentId(1),))
    result, value = second.load(1, within_s=0.05)
    assert (value, result.late) == (COMPUTED, ONE), "there is no room while the first read goes on"
    files.may_read.set()
    while second.store.has_leaving:
        second.step()
    assert second.load(1)[1] == 1
    second.close()


def test_what_is_dropped_while_it_is_written_leaves_no_file(tmp_path: Path) -> None:
    """Its memory is free when the writer has done with it, not before."""
    files = WaitingFiles()
    worker = DiskWorker(tmp_path, max_segments=1, files=files)
    files.may_write.clear()
    worker.save(1)
    while worker.store._writing is None:
        pass
    worker.step(drops=(SegmentId(1),))
    assert worker.store.has_leaving
    files.may_write.set()
    while worker.store.has_leaving:
        worker.step()
    worker.save(2)
    worker.wait_written(2)
    worker.close()
    assert [path.name for path in tmp_path.rglob("*.kv*")] == [f"{2:016x}.kv"]


def test_what_left_memory_is_read_again(tmp_path: Path) -> None:
    """More segments than memory has room for, one after the other."""
    worker = DiskWorker(tmp_path, max_segments=1)
    for number in (1, 2, 3):
        worker.save(number)
        worker.wait_written(number)
        worker.step(evictions=(SegmentId(number),))
    for number in (3, 1, 2, 1):
        assert worker.load(number)[1] == number
        worker.step(evictions=(SegmentId(number),))
    worker.close()


def test_new_weights_delete_the_files(tmp_path: Path) -> None:
    """What is saved after that is not written: after a restart it would count as of the first weights."""
    worker = DiskWorker(tmp_path)
    worker.save(1, 2)
    worker.wait_written(1, 2)
    worker.worker.forget_segments()
    worker.save(3)
    worker.close()
    assert list(tmp_path.rglob("*.kv*")) == []


def test_what_is_damaged_in_memory_is_not_written(tmp_path: Path) -> None:
    """Its checks on disk would be those of wrong bytes."""
    files = WaitingFiles()
    worker = DiskWorker(tmp_path, files=files)
    files.may_write.clear()
    worker.save(1, 2)
    worker.store.find([SegmentId(2)])[SegmentId(2)].rows[0, 0, 0, 0, 0] += 1
    files.may_write.set()
    worker.wait_written(1)
    worker.close()
    assert [path.name for path in tmp_path.rglob("*.kv*")] == [f"{1:016x}.kv"]


@pytest.mark.parametrize("call", ["create", "write", "sync", "rename"])
def test_a_disk_that_cannot_be_written_harms_nobody(tmp_path: Path, call: str) -> None:
    """KV stays in memory; when the disk works again, it is written. Both are reported once."""
    is_full, files = [True], FaultyFiles(lambda name: errno.ENOSPC if is_full[0] and name == call else None)
    worker = DiskWorker(tmp_path, files=files)
    worker.save(1)
    assert worker.load(1)[1] == 1
    deadline = time.monotonic() + 60
    while not worker.problems:
        assert time.monotonic() < deadline
        worker.step()
    is_full[0] = False
    worker.wait_written(1)
    worker.step()
    assert worker.problems == [os.strerror(errno.ENOSPC), None]
    worker.close()


def test_a_kill_at_any_point_loses_nothing_that_was_promised(tmp_path: Path) -> None:
    """Before every call of the system: what is found is right, and what was reported as written is there."""
    folder = tmp_path / "live"
    folder.mkdir()
    files = SnapshotFiles(folder, tmp_path / "points")
    worker = DiskWorker(folder, files=files)
    files.promised = worker.written
    for number in (1, 2, 3):
        worker.save(number)
        worker.wait_written(number)
    worker.written.remove(2)
    worker.step(drops=(SegmentId(2),))
    worker.save(4)
    worker.wait_written(4)
    worker.close()
    assert len(files.points) > 40
    for point, promised in files.points:
        again = DiskWorker(point)
        found = {int(each.segment_id) for each in again.found}
        assert set(promised) <= found
        for number in (1, 2, 3, 4):
            assert again.load(number)[1] == (number if number in found else COMPUTED)
            again.step(evictions=(SegmentId(number),))
        again.close()


class _Start(SimpleNamespace):
    """What `with_disk` reads of a start."""


def handshake() -> WorkerHandshake:
    from kvshare.vllm_connector.metadata import WorkerHandshake

    return WorkerHandshake(unsupported=(), weights="w")


def start(folder: Path) -> _Start:
    from kvshare.vllm_connector.config import ConnectorSettings

    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"),
        model_config=SimpleNamespace(compute_hash=lambda: "of the model's settings"),
        kv_transfer_config=SimpleNamespace(engine_id="e"),
        parallel_config=SimpleNamespace(data_parallel_index=0),
    )
    settings = ConnectorSettings(disk_path=str(folder), disk_bytes=1 << 30)
    return _Start(settings=settings, config=config)


def test_two_processes_never_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one has no disk, and says why; when the first one has ended, the next one has it."""
    from kvshare.vllm_connector.worker import disk_start
    from tests.kvshare.vllm_connector.worker.small_worker import new_worker

    monkeypatch.setattr(disk_start, "_LOCK_WAIT_S", 0.0)
    attached = new_worker(1).attached
    first, said = disk_start.with_disk(attached, handshake(), start(tmp_path))  # type: ignore[arg-type]
    assert said.has_disk
    _, refused = disk_start.with_disk(attached, handshake(), start(tmp_path))  # type: ignore[arg-type]
    assert not refused.has_disk
    assert "--disk is not used: another process uses the folder" in refused.warnings[0]
    first.store.close()
    again, said = disk_start.with_disk(attached, handshake(), start(tmp_path))  # type: ignore[arg-type]
    assert said.has_disk
    again.store.close()


def test_a_disk_is_refused_where_ranks_share_the_work(tmp_path: Path) -> None:
    """One sentence says so, and memory works as without it."""
    from kvshare.vllm_connector.worker import disk_start
    from tests.kvshare.vllm_connector.worker.small_worker import new_worker

    attached = new_worker(1).attached
    with patch.object(disk_start, "num_ranks", lambda: 2):
        same, said = disk_start.with_disk(attached, handshake(), start(tmp_path))  # type: ignore[arg-type]
    assert same is attached
    assert said.warnings == (
        "--disk is not used: it does not support tensor parallelism yet, this vLLM has 2 ranks",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_used_is_no_reason_to_stop(tmp_path: Path) -> None:
    """The system's words are in the warning."""
    from kvshare.vllm_connector.worker import disk_start
    from tests.kvshare.vllm_connector.worker.small_worker import new_worker

    (tmp_path / "file").write_text("")
    _, said = disk_start.with_disk(new_worker(1).attached, handshake(), start(tmp_path / "file" / "x"))  # type: ignore[arg-type]
    assert said.warnings == ("--disk is not used: Not a directory",)
