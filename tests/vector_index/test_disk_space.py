"""A nearly full disk: nothing is written to the index, prefixes go on, and what was missed is made up for."""

import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from vector_index import (
    DiskSpace,
    Entry,
    IndexPausedError,
    IndexSchema,
    Nominator,
    NominatorSettings,
    PromptRecord,
    QdrantEdgeIndex,
)
from vector_index.backlog import Backlog
from vector_index.errors import IndexUnavailableError

FLOOR = 1000
SETTINGS = NominatorSettings(search_timeout_s=5.0, write_timeout_s=60.0)
EMBEDDING = np.ones(8, dtype=np.float32)


class Disk(DiskSpace):
    """A disk whose free space the test says."""

    def __init__(self, free: int = 10 * FLOOR) -> None:
        super().__init__(Path("/somewhere"), FLOOR)
        self.free = free

    def free_bytes(self) -> int:
        return self.free


def tokens(seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 32_000, 400).astype(np.int32)


def with_another_head(seed: int) -> NDArray[np.int32]:
    return np.concatenate([tokens(10**6)[:8], tokens(seed)[8:]])


def record(prompt_id: int, namespace: str = "a") -> PromptRecord:
    return PromptRecord(prompt_id, namespace, tokens(prompt_id))


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
async def index(disk: Disk, tmp_path: Path) -> AsyncIterator[QdrantEdgeIndex]:
    """The real index, on a disk that the test fills."""
    index = QdrantEdgeIndex(replace(SETTINGS.schema(None), dimension=8), tmp_path)
    index.space = disk
    await index.recreate()
    yield index
    await index.close()


@pytest.fixture
async def nominator(index: QdrantEdgeIndex) -> AsyncIterator[Nominator]:
    nominator = Nominator(index, settings=SETTINGS)
    yield nominator
    nominator.close()


async def found(nominator: Nominator, token_ids: NDArray[np.int32]) -> list[int]:
    nomination = await nominator.nominate("a", token_ids, None, allow_dense=False)
    return [candidate.prompt_id for candidate in nomination.candidates]


def test_the_room_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    """The nearest folder that exists tells; a floor above all disks is always too high."""
    folder = tmp_path / "not" / "yet"
    assert DiskSpace(folder, 0).free_bytes() > 0
    assert DiskSpace(folder, 0).why_low() is None
    with pytest.raises(IndexPausedError, match="are needed"):
        DiskSpace(folder, 2**60).check()


def test_crossing_the_threshold_is_logged_once(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """One line when writing stops and one when it resumes, which needs more space than the threshold."""
    with caplog.at_level(logging.WARNING):
        for disk.free in (FLOOR, FLOOR - 1, 0, FLOOR, FLOOR + 1):
            disk.why_low()
        assert len(caplog.messages) == 1
        assert disk.why_low() is not None
        disk.free = 2 * FLOOR
        assert disk.why_low() is None
        assert disk.why_low() is None
    assert [message.split(":")[0] for message in caplog.messages] == [
        "the index is not written any more",
        "the index is written again",
    ]


@pytest.mark.parametrize("verb", ["upsert", "delete", "maintain", "optimise", "recreate"])
async def test_nothing_is_written_without_room(index: QdrantEdgeIndex, disk: Disk, verb: str) -> None:
    """Whatever would touch the mapped files for writing is refused before it does."""
    await index.upsert([Entry(1, "a", np.array([1], dtype=np.uint32), EMBEDDING)])
    disk.free = FLOOR - 1
    arguments: dict[str, tuple[object, ...]] = {
        "upsert": ([Entry(2, "a", np.array([2], dtype=np.uint32))],),
        "delete": ("a", [1]),
    }
    with pytest.raises(IndexPausedError):
        await getattr(index, verb)(*arguments.get(verb, ()))
    if verb != "recreate":  # throws away what is stored: that needs no room
        assert await index.count() == 1
        assert await index.search_fingerprints("a", np.array([1], dtype=np.uint32), 5)


async def test_an_index_is_opened_when_there_is_room(tmp_path: Path, schema: IndexSchema) -> None:
    """Until then it finds nothing and is paused; what was stored before is there afterwards."""
    index = QdrantEdgeIndex(schema, tmp_path)
    await index.open()
    await index.upsert([Entry(1, "a", np.array([1], dtype=np.uint32))])
    await index.close()
    index.space = disk = Disk(free=0)
    with pytest.raises(IndexPausedError):
        await index.open()
    assert await index.search_fingerprints("a", np.array([1], dtype=np.uint32), 5) == []
    await index.resume()
    assert index.why_paused() is not None
    disk.free = 10 * FLOOR
    assert index.why_paused() is not None  # not before it is open
    await index.resume()
    assert index.why_paused() is None
    assert await index.count() == 1
    await index.close()


async def test_optimising_waits_for_room_for_a_second_copy(
    tmp_path: Path, schema: IndexSchema, caplog: pytest.LogCaptureFixture
) -> None:
    """There is enough space now, but not while segments are built: it is put off and logged once."""
    index = QdrantEdgeIndex(schema, tmp_path, optimise_after=1)
    index.space = disk = Disk()
    await index.open()
    await index.upsert([Entry(1, "a", np.array([1], dtype=np.uint32), EMBEDDING)])
    for _ in range(2):
        await index.maintain()
    assert [message for message in caplog.messages if "not optimised" in message] == caplog.messages
    assert len(caplog.messages) == 1
    disk.free = 10**9
    await index.maintain()
    assert await index.count() == 1
    await index.close()


async def test_a_paused_index_costs_no_prefix_and_catches_up(
    nominator: Nominator, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """What is stored meanwhile is found by prefix at once, and by fingerprints afterwards."""
    await nominator.remember(1, "a", tokens(1))
    await nominator.remember(2, "a", tokens(2))
    disk.free = 0
    for prompt_id in range(10, 60):
        assert await nominator.remember(prompt_id, "a", tokens(prompt_id)) == ()
    assert await nominator.forget("a", [2, 11]) == ()
    await nominator.catch_up()
    assert nominator.num_waiting == 49
    assert await found(nominator, tokens(10)) == [10]
    assert await found(nominator, with_another_head(10)) == []
    assert await found(nominator, with_another_head(1)) == [1]
    disk.free = 10 * FLOOR
    await nominator.catch_up()
    assert nominator.num_waiting == 0
    for prompt_id, ids in {1: [1], 2: [], 10: [10], 11: [], 59: [59]}.items():
        assert await found(nominator, with_another_head(prompt_id)) == ids
    assert "could not" not in caplog.text


async def test_what_cannot_be_written_when_it_catches_up_waits_on(
    nominator: Nominator, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause is over, but writes fail: nothing of the backlog is lost."""
    disk.free = 0
    for prompt_id in range(10, 60):
        await nominator.remember(prompt_id, "a", tokens(prompt_id))
    disk.free = 10 * FLOOR

    async def fail(*_: object) -> None:
        raise IndexUnavailableError("not now")

    with monkeypatch.context() as broken:
        broken.setattr(QdrantEdgeIndex, "upsert", fail)
        await nominator.catch_up()
    assert nominator.num_waiting == 50
    await nominator.catch_up()
    assert nominator.num_waiting == 0
    assert await found(nominator, with_another_head(59)) == [59]


async def test_many_are_deleted_in_slices(
    tmp_path: Path, schema: IndexSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, and none of another namespace."""
    monkeypatch.setattr("vector_index.qdrant_edge._DELETED", 4)
    index = QdrantEdgeIndex(schema, tmp_path)
    await index.open()
    await index.upsert([Entry(number, "a", np.array([number], dtype=np.uint32)) for number in range(1, 12)])
    await index.upsert([Entry(12, "b", np.array([12], dtype=np.uint32))])
    await index.delete("a", list(range(2, 13)))
    assert await index.count() == 2
    await index.close()


def test_a_backlog_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest records go first and are counted; one that comes again is the newest."""
    monkeypatch.setattr("vector_index.backlog._MAX_RECORDS", 2)
    backlog = Backlog()
    backlog.add([record(1), record(2), record(1), record(3)])
    assert (list(backlog.records), backlog.num_dropped) == ([1, 3], 1)
    monkeypatch.setattr("vector_index.backlog._MAX_DELETED", 2)
    for prompt_id, namespace in ((10, "a"), (10, "a"), (11, "b"), (12, "a"), (13, "c")):
        backlog.delete(namespace, [prompt_id])
    assert backlog.deleted == {"a": {10}, "b": {11}}
