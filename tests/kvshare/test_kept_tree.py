"""A tree that could not be in its file moves there while the server runs; one whose file was lost, too."""

from __future__ import annotations

import logging
import shutil
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from delta_tree import DeltaTree
from delta_tree.storage import Storage
from kvshare.kept_tree import KeptTree
from kvshare.metadata import METADATA_FILE, open_tree
from kvshare.part_problems import PartProblem
from kvshare.parts import ServedPart
from tests.delta_tree.fake_prompts import child_draft, fresh_draft
from tests.delta_tree.stores import content

MODEL = "model"


def blocked(tmp_path: Path) -> Path:
    """A folder that cannot be made, as a file is in its place: also for root."""
    (tmp_path / "file").write_text("no folder")
    return tmp_path / "file" / "store"


def filled(tree: DeltaTree) -> DeltaTree:
    root = tree.insert(fresh_draft(list(range(100)))).node
    tree.insert(child_draft(root, 50, [7]))
    tree.pin(root.node_id)
    return tree


def reopened(folder: Path) -> object:
    with DeltaTree.open(folder / METADATA_FILE, identity=MODEL) as tree:
        return content(tree)


def test_a_tree_moves_from_memory_into_its_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With parents and pins, and each later change; the log has one warning before and one line after it."""
    folder = blocked(tmp_path)
    tree = filled(open_tree(str(folder), identity=MODEL, loss=""))
    kept = KeptTree(tree, str(folder), identity=MODEL)
    assert not kept.look()
    assert kept.reading(None).problem is PartProblem.STORE_IN_MEMORY
    (tmp_path / "file").unlink()
    assert kept.look()
    assert not kept.look()
    assert kept.reading(None).problem is None
    tree.insert(fresh_draft([1, 2, 3]))
    before = content(tree)
    tree.close()
    assert reopened(folder) == before
    begun, over = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "in memory, and lost with the process" in begun
    assert "is written again" in over


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_file_that_was_deleted_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_replaced: bool
) -> None:
    """SQLite would go on writing into what nobody finds again."""
    tree = filled(open_tree(str(tmp_path / "store"), identity=MODEL, loss=""))
    kept = KeptTree(tree, str(tmp_path / "store"), identity=MODEL)
    path = tmp_path / "store" / METADATA_FILE
    shutil.rmtree(path.parent)
    if is_replaced:
        DeltaTree.open(path, identity=MODEL).close()
    assert kept.look()
    tree.insert(fresh_draft([1, 2, 3]))
    before = content(tree)
    tree.close()
    assert reopened(tmp_path / "store") == before
    assert "written again, nothing is lost" in caplog.text


def test_what_an_earlier_run_left_gives_way(tmp_path: Path) -> None:
    """A store that is damaged or of another model is moved aside, as at a start."""
    folder = blocked(tmp_path)
    tree = filled(open_tree(str(folder), identity=MODEL, loss=""))
    kept = KeptTree(tree, str(folder), identity=MODEL)
    (tmp_path / "file").unlink()
    folder.mkdir(parents=True)
    with DeltaTree.open(folder / METADATA_FILE, identity="another model") as other:
        other.insert(fresh_draft([9, 9]))
    assert kept.look()
    before = content(tree)
    tree.close()
    assert reopened(folder) == before
    assert (folder / f"{METADATA_FILE}.old").exists()


def test_what_an_earlier_run_or_a_backup_has_is_kept_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its prompts may be wanted: the log says where they are. A later look does not move them again."""
    folder = blocked(tmp_path)
    kept = KeptTree(open_tree(str(folder), identity=MODEL, loss=""), str(folder), identity=MODEL)
    (tmp_path / "file").unlink()
    with DeltaTree.open(folder / METADATA_FILE, identity=MODEL) as earlier:
        before = content(filled(earlier))
    assert kept.look()
    assert not kept.look()
    aside = f"{METADATA_FILE}.old"
    with DeltaTree.open(folder / aside, identity=MODEL) as found:
        assert content(found) == before
    assert f"has prompts that this server does not serve: it was moved to {aside}" in caplog.text


def test_a_file_that_is_out_of_reach_for_a_while_is_well_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the same file then, and nothing has to be written."""
    folder = tmp_path / "store"
    kept = KeptTree(open_tree(str(folder), identity=MODEL, loss=""), str(folder), identity=MODEL)
    folder.rename(tmp_path / "away")
    folder.write_text("no folder")
    assert not kept.look()
    assert kept.reading(None).problem is PartProblem.STORE_IN_MEMORY
    folder.unlink()
    (tmp_path / "away").rename(folder)
    assert not kept.look()
    assert kept.reading(None).problem is None
    assert "is there again" in caplog.text


def test_a_file_that_is_waited_for_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have it: requests look at the tree meanwhile."""
    tree, opened, waits = DeltaTree.open(None, identity=MODEL), Storage.open, list[bool]()

    def look_meanwhile(*args: Any, **named: Any) -> Storage:
        look = threading.Thread(target=tree.pinned, daemon=True)
        look.start()
        look.join(60)
        waits.append(look.is_alive())
        return opened(*args, **named)

    monkeypatch.setattr(Storage, "open", look_meanwhile)
    tree.attach(tmp_path / METADATA_FILE, identity=MODEL)
    assert waits == [False]
    tree.close()


def test_a_file_of_another_process_is_left_alone(tmp_path: Path) -> None:
    """The tree stays in memory, and is as before; the list of parts says why."""
    folder = blocked(tmp_path)
    tree = filled(open_tree(str(folder), identity=MODEL, loss=""))
    kept = KeptTree(tree, str(folder), identity=MODEL)
    (tmp_path / "file").unlink()
    with DeltaTree.open(folder / METADATA_FILE, identity=MODEL):
        assert not kept.look()
    reading = kept.reading(None)
    assert (reading.part, reading.problem, reading.cause) == (
        ServedPart.STORE,
        PartProblem.STORE_IN_MEMORY,
        "is open in another process",
    )
    assert tree.identity is None
    assert tree.stats().num_nodes == 2


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    """It is not ours to move."""
    folder = tmp_path / "store"
    folder.mkdir()
    with sqlite3.connect(folder / METADATA_FILE) as other:
        other.execute("CREATE TABLE theirs (a)")
    other.close()
    kept = KeptTree(open_tree(str(folder), identity=MODEL, loss=""), str(folder), identity=MODEL)
    assert not kept.look()
    assert kept.reading(None).cause == "belongs to another program"


def test_a_tree_without_a_folder_is_well_in_memory() -> None:
    """`store.path: null` is what the operator chose."""
    kept = KeptTree(DeltaTree.open(None, identity=MODEL), None, identity=MODEL)
    assert not kept.look()
    assert kept.reading(None).problem is None
    assert kept.reading("cannot be used").problem is PartProblem.STORE_NOT_WRITTEN
