"""A running embedded engine gets well without a restart: its folder was unusable, or its files are gone."""

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from delta_tree import StoreUnavailableError
from delta_tree.storage import Storage
from kvshare import runtime
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.part_problems import PartProblem
from kvshare.parts import ServedPart
from tests.kvshare.embedded.test_restart import DONOR, asked, edited, objects, running
from tests.kvshare.embedded.tiny_engine import prompt, stored


def problems(engine: EmbeddedEngine) -> dict[ServedPart, PartProblem | None]:
    return {reading.part: reading.problem for reading in engine.status().parts}


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  the engine does not say when it has looked
            await asyncio.sleep(0.02)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "_LOOK_EVERY_S", 0.05)


async def test_a_folder_that_can_be_used_later_is_used(tmp_path: Path) -> None:
    """Meanwhile all is in memory; afterwards metadata and KV are on disk, and outlive the engine."""
    blocker = tmp_path / "file"
    blocker.write_text("no folder")  # in the place of a folder: root may write into read-only ones
    async with running(blocker / "store") as engine:
        await stored(engine, DONOR)
        before = await asked(engine, edited())
        assert (problems(engine)[ServedPart.STORE], problems(engine)[ServedPart.DISK]) == (
            PartProblem.STORE_IN_MEMORY,
            PartProblem.DISK_NOT_WRITTEN,
        )
        blocker.unlink()
        await eventually(lambda: problems(engine)[ServedPart.STORE] is None)
        await eventually(lambda: problems(engine)[ServedPart.DISK] is None)
        await eventually(lambda: len(objects(blocker)) > 0)
    async with running(blocker / "store") as engine:
        again = await asked(engine, edited())
        assert engine.status().tiers[1].num_hits >= 1
    assert (again.text, again.report.num_cached) == (before.text, before.report.num_cached)


def delete(folder: Path) -> None:
    """Files may come meanwhile."""
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)


async def test_a_store_that_is_deleted_is_written_anew(tmp_path: Path) -> None:
    """Metadata and KV: prompts that are in memory are served, and later ones outlive the engine."""
    folder = tmp_path / "store"
    async with running(folder) as engine:
        await stored(engine, DONOR)
        before = await asked(engine, edited())
        delete(folder)
        await eventually(lambda: (folder / "tree.sqlite3").exists())
        assert (await asked(engine, edited())).text == before.text
        later = prompt(200, seed=5)
        await stored(engine, later)
        await eventually(lambda: len(objects(folder)) > 0)
        assert problems(engine)[ServedPart.STORE] is None
    async with running(folder) as engine:
        assert (await asked(engine, later)).report.num_cached > 0


def full(*_: object) -> None:
    raise StoreUnavailableError(Path("store"), "database or disk is full")


async def test_a_store_that_is_written_anew_takes_prompts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The list of parts says so at once, and not with the next prompt."""
    folder = tmp_path / "store"
    async with running(folder) as engine:
        monkeypatch.setattr(Storage, "write", full)
        await stored(engine, DONOR)
        assert problems(engine)[ServedPart.STORE] == PartProblem.STORE_NOT_WRITTEN
        delete(folder)
        await eventually(lambda: problems(engine)[ServedPart.STORE] is None)


async def test_an_idle_server_gets_well_too(tmp_path: Path) -> None:
    """Nothing new is stored: the disk is well once it is open."""
    blocker = tmp_path / "file"
    blocker.write_text("no folder")
    async with running(blocker / "store") as engine:
        assert problems(engine)[ServedPart.DISK] == PartProblem.DISK_NOT_WRITTEN
        blocker.unlink()
        await eventually(lambda: problems(engine)[ServedPart.DISK] is None)
        assert problems(engine)[ServedPart.STORE] is None


async def test_a_store_that_appears_late_is_kept_aside_with_its_kv(tmp_path: Path) -> None:
    """Moved back while the server is stopped, it serves what it had."""
    folder, away = tmp_path / "store", tmp_path / "away"
    async with running(folder) as engine:
        await stored(engine, DONOR)
        before = await asked(engine, edited())
    folder.rename(away)
    folder.write_text("no folder")
    async with running(folder) as engine:
        folder.unlink()
        away.rename(folder)
        await eventually(lambda: problems(engine)[ServedPart.DISK] is None)
        assert (folder / "tree.sqlite3.old").exists()
    (folder / "tree.sqlite3.old").replace(folder / "tree.sqlite3")
    async with running(folder) as engine:
        again = await asked(engine, edited())
    assert (again.text, again.report.num_cached) == (before.text, before.report.num_cached)


async def test_a_disk_too_full_at_the_start_loses_no_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing what lost its KV is written later: the tree stays in its file meanwhile."""
    async with running(tmp_path) as engine:
        await stored(engine, DONOR)
        await stored(engine, prompt(200, seed=5))
    objects(tmp_path)[0].unlink()

    with monkeypatch.context() as patched:
        patched.setattr(Storage, "write", full)
        async with running(tmp_path) as engine:
            assert problems(engine)[ServedPart.STORE] is None
            assert engine.status().num_nodes == 1


async def test_without_a_folder_nothing_is_wrong(tmp_path: Path) -> None:
    """`store.path: null` is a choice: no part is less than well, and nothing is written anywhere."""
    in_memory: dict[str, Any] = {"store.path": None}
    async with running(tmp_path, **in_memory) as engine:
        await stored(engine, DONOR)
        assert (await asked(engine, edited())).report.num_cached > 0
        found = problems(engine)
    assert found.pop(ServedPart.MODEL) in (PartProblem.MODEL_CAUTIOUS, None)
    assert set(found.values()) == {None}
    assert ServedPart.DISK not in found
    assert not objects(tmp_path)
