"""A load that is read from disk in parts: each is copied while the next one is read."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import SegmentId, Span
from kvshare.tiers.files import Files
from kvshare.vllm_protocol.messages import WireCopy
from kvshare.vllm_protocol.places import READ_PARTS
from tests.kvshare.vllm_connector.worker.disk_worker import TARGET, DiskWorker
from tests.kvshare.vllm_connector.worker.small_worker import NUM_TOKENS, late_copies, one_rank

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import LoadResult, WorkerReport

NUMBERS = (1, 2, 3, 4)
OF_EACH = 4  # tokens that are copied from each segment; those after them are computed
COMPUTED = [16.5, 17.5, 18.5]  # the worker's rows for these; the last token is vLLM's


@pytest.fixture(autouse=True)
def single_rank() -> Iterator[None]:
    with one_rank():
        yield


class OneByOne(Files):
    """Once `waits`, the file of each number in `waiting` is read when its event is set."""

    waits = False

    def __init__(self, *waiting: int) -> None:
        self.may_read = {f"{number:016x}.kv": threading.Event() for number in waiting}
        self._names: dict[int, str] = {}

    def open(self, path: Path) -> int:
        descriptor = super().open(path)
        self._names[descriptor] = path.name
        return descriptor

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        if self.waits and (event := self.may_read.get(self._names.get(descriptor, ""))) is not None:
            event.wait(120)
        return super().read(descriptor, into, offset)

    def let(self, number: int) -> None:
        self.may_read[f"{number:016x}.kv"].set()


def on_disk(folder: Path, files: Files | None = None, *, in_memory: Sequence[int] = ()) -> DiskWorker:
    """A process that finds the segments on disk, and has read some of them before."""
    first = DiskWorker(folder, max_segments=len(NUMBERS))
    first.save(*NUMBERS)
    first.wait_written(*NUMBERS)
    first.close()
    second = DiskWorker(folder, max_segments=len(NUMBERS), files=files)
    for number in in_memory:
        second.load(number)
    if isinstance(files, OneByOne):
        files.waits = True
    return second


def begin(worker: DiskWorker, *, within_s: float = 60.0) -> WorkerReport | None:
    """A prompt that copies from each of the segments; what is reported at once."""
    from kvshare.vllm_connector.metadata import LoadRequest

    copies = tuple(
        WireCopy(SegmentId(number), 0, OF_EACH, place * OF_EACH, place * OF_EACH)
        for place, number in enumerate(NUMBERS)
    )
    tokens = tuple(range(NUM_TOKENS))
    load = LoadRequest("l", TARGET, 0, NUM_TOKENS, tokens, copies, reads_within_s=within_s)
    return worker.step(loads=(load,))


def rows_of(worker: DiskWorker) -> list[float]:
    """What the blocks hold for each token but the last."""
    found: list[float] = worker.cache.read(TARGET, Span(0, NUM_TOKENS - 1)).k[0, :, 0, 0].tolist()
    return found


def result(worker: DiskWorker, report: WorkerReport | None) -> tuple[LoadResult, Mapping[str, float]]:
    """How the load ends, and what its stages took. `report`: of its first step."""
    deadline, stages = time.monotonic() + 120, dict[str, float]()
    while True:
        if report is not None:
            stages |= report.stage_seconds.get("l", {})
            if "l" in report.loads:
                return report.loads["l"], stages
        assert time.monotonic() < deadline
        time.sleep(0.001)
        report = worker.step()


def copied(*numbers: int) -> list[float]:
    """Rows with the copies of these segments, and what the worker computes in place of others."""
    rows = [
        float(number) if number in numbers else place * OF_EACH + token + 0.5
        for place, number in enumerate(NUMBERS)
        for token in range(OF_EACH)
    ]
    return rows + COMPUTED


@pytest.mark.parametrize("order", list(permutations(NUMBERS))[::5])
def test_each_part_is_copied_while_the_next_is_read(tmp_path: Path, order: Sequence[int]) -> None:
    """In the order in which the reads were begun, whichever is over first; the end is that of one load."""
    files = OneByOne(*NUMBERS)
    worker = on_disk(tmp_path, files)
    began = begin(worker)
    for number in order[:-1]:
        files.let(number)
    files.let(order[-1])
    found, stages = result(worker, began)
    assert (found.failed, found.unreadable, found.late) == (False, frozenset(), frozenset())
    assert rows_of(worker) == copied(*NUMBERS)
    assert 0 <= stages["hidden"] <= stages["write"] + stages["verify"]
    assert stages["disk"] > 0
    worker.close()


def test_what_is_read_is_in_its_blocks_before_all_is(tmp_path: Path) -> None:
    """The first part to be read has been copied while the others wait for the disk."""
    files = OneByOne(*NUMBERS)
    worker = on_disk(tmp_path, files)
    began = begin(worker)
    first = next(read.segment_id for read in worker.store._reads.values())
    files.let(int(first))
    place, deadline = NUMBERS.index(int(first)) * OF_EACH, time.monotonic() + 60
    while rows_of(worker)[place] != float(first):
        assert time.monotonic() < deadline
        late_copies(worker.worker).run()
    assert [row for row in rows_of(worker)[:16] if row in NUMBERS] == [float(first)] * OF_EACH
    for number in NUMBERS:
        files.let(number)
    assert not result(worker, began)[0].failed
    assert rows_of(worker) == copied(*NUMBERS)
    worker.close()


@pytest.mark.parametrize("late", [(1,), (4,), (2, 3), NUMBERS])
def test_parts_that_are_late_are_computed(tmp_path: Path, late: Sequence[int]) -> None:
    """The others are copied; what is late stays on disk, and is read the next time."""
    files = OneByOne(*late)
    worker = on_disk(tmp_path, files)
    began = begin(worker, within_s=0.3)
    found, _ = result(worker, began)
    ids = frozenset(map(SegmentId, late))
    assert (found.failed, found.late, found.unreadable) == (False, ids, ids)
    assert rows_of(worker) == copied(*(number for number in NUMBERS if number not in late))
    for number in late:
        files.let(number)
        assert SegmentId(number) in worker.disk
    worker.close()


@pytest.mark.parametrize("spoilt", NUMBERS)
def test_a_wrong_sum_in_one_part_is_computed(tmp_path: Path, spoilt: int) -> None:
    """Of no other part anything is computed again."""
    worker = on_disk(tmp_path)
    path = worker.path(spoilt)
    raw = bytearray(path.read_bytes())
    raw[-100] ^= 4
    path.write_bytes(raw)
    began = begin(worker)
    found, _ = result(worker, began)
    assert (found.failed, found.late) == (False, frozenset())
    assert found.unreadable == {SegmentId(spoilt)}
    assert rows_of(worker) == copied(*(number for number in NUMBERS if number != spoilt))
    worker.close()


def test_what_is_damaged_in_memory_is_found_with_parts_from_disk(tmp_path: Path) -> None:
    """What is in memory is the first part, and is checked like the others."""
    worker = on_disk(tmp_path, in_memory=(2, 3))
    stored = worker.store.find([SegmentId(3)])[SegmentId(3)]
    stored.rows[0, 0, 0, 0, 0] += 1
    began = begin(worker)
    found, _ = result(worker, began)
    assert found.unreadable == {SegmentId(3)}
    assert rows_of(worker) == copied(1, 2, 4)
    worker.close()


def test_a_part_that_fails_fails_the_load(tmp_path: Path) -> None:
    """vLLM computes the prompt. Later loads find what was read; segments that are dropped leave memory."""
    files = OneByOne(*NUMBERS)
    worker = on_disk(tmp_path, files)
    began = begin(worker)
    for number in NUMBERS:
        files.let(number)
    for read in worker.store._reads.values():
        read.wait()
    late_copies(worker.worker).fail()
    assert result(worker, began)[0].failed
    began = begin(worker)
    assert not result(worker, began)[0].failed
    assert rows_of(worker) == copied(*NUMBERS)
    worker.step(drops=tuple(map(SegmentId, NUMBERS)))
    worker.step()
    assert not worker.store.has_leaving
    worker.close()


def test_parts_have_as_many_reads_as_each_other() -> None:
    """Four at most, each read in one of them, in order."""
    from kvshare.vllm_connector.worker.disk_reads import Reads

    for number in range(12):
        reads: Any = list(range(number))
        parts = Reads.__new__(Reads)
        parts.reads = reads
        found = parts.parts(READ_PARTS)
        assert [each for part in found for each in part] == reads
        assert len(found) == min(number, READ_PARTS)
        assert all(number // READ_PARTS <= len(part) <= number // READ_PARTS + 1 for part in found)


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=1, max_size=5))
def test_hidden_is_what_both_take_less_together(parts: list[tuple[float, float]]) -> None:
    """Never more than all but the last part of the copies, or than the time until the last part is read."""
    from kvshare.vllm_connector.worker.disk_first import hidden_s

    read_s = sorted(read for read, _ in parts)
    copy_s = [copies for _, copies in parts]
    hidden = hidden_s(read_s, copy_s)
    assert 0 <= hidden <= min(sum(copy_s[:-1]), read_s[-1]) + 1e-9
    assert hidden_s([4.0, 8.0, 12.0, 16.0], [1.0] * 4) == 3.0, "all but the last part"
    assert hidden_s([1.0, 2.0, 3.0, 4.0], [4.0] * 4) == 3.0, "all but the first read"
