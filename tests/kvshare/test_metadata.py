"""A cache never keeps the server from starting: it is moved aside or left alone, with one warning."""

from __future__ import annotations

import sqlite3
import stat
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from delta_tree import DeltaTree
from kvshare.errors import StoreError
from kvshare.metadata import METADATA_FILE, check_not_in_use, open_emptied_tree, open_tree
from tests.delta_tree.fake_prompts import fresh_draft

IDENTITY = "model:float32"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with one prompt."""
    path = tmp_path / METADATA_FILE
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        tree.insert(fresh_draft([1, 2, 3]))
    return path


def damage(path: Path) -> None:
    path.write_bytes(b"no database" * 999)


def damage_a_page(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:100] + b"\xff" * 2000 + content[2100:])


def of_another_model(path: Path) -> None:
    path.unlink()
    DeltaTree.open(path, identity="other:float32").close()


def of_another_version(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA user_version = 99")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (damage, "is damaged"),
        (damage_a_page, "is damaged"),
        (of_another_model, "another model"),
        (of_another_version, "schema version 99"),
    ],
)
def test_what_cannot_be_used_is_moved_aside(
    path: Path, spoil: Callable[[Path], None], told: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One generation, the owner's only; the warning says what, where to, what is lost."""
    for is_second in (False, True):
        spoil(path)
        before = path.read_bytes()
        caplog.clear()
        with open_tree(str(path.parent), identity=IDENTITY, loss="THE LOSS") as tree:
            assert tree.nodes() == ()
            tree.insert(fresh_draft([1, 2, 3]))
        (message,) = warnings_of(caplog)
        assert told in message
        assert "tree.sqlite3.old" in message
        assert (", over an earlier one" in message) is is_second
        assert "THE LOSS" in message
        old = path.with_name("tree.sqlite3.old")
        assert old.read_bytes() == before
        assert stat.S_IMODE(old.stat().st_mode) == stat.S_IMODE(path.stat().st_mode) == 0o600
        names = {entry.name.removesuffix("-journal") for entry in path.parent.iterdir()}
        assert names == {path.name, old.name}


def test_a_store_that_fits_is_taken_in_silence(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its prompts are there; where their KV is gone they are dropped, and told to the index."""
    with open_tree(str(path.parent), identity=IDENTITY, loss="") as tree:
        (node,) = tree.nodes()
    tree, forgotten = open_emptied_tree(str(path.parent), identity=IDENTITY)
    with tree:
        assert (tree.nodes(), forgotten) == ((), [(node.namespace, node.node_id)])
    assert warnings_of(caplog) == []


def test_another_programs_database_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is nobody's cache: the tree is in memory instead."""
    path = tmp_path / METADATA_FILE
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    before = path.read_bytes()
    with open_tree(str(tmp_path), identity=IDENTITY, loss="") as tree:
        tree.insert(fresh_draft([1, 2, 3]))
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (before, [path])
    (message,) = warnings_of(caplog)
    assert "belongs to another program" in message
    assert "in memory" in message


def test_a_folder_that_cannot_be_made_means_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A read-only folder and a full disk end the same way; here a file is where the folder should be."""
    (tmp_path / "file").write_text("a file")
    with open_tree(str(tmp_path / "file"), identity=IDENTITY, loss="") as tree:
        tree.insert(fresh_draft([1, 2, 3]))
    assert len(warnings_of(caplog)) == 1


def test_a_store_that_cannot_be_emptied_means_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk may be too full for that and not too full for opening."""
    opened = DeltaTree.open

    def without_room(*args: Any, **named: Any) -> DeltaTree:
        tree = opened(*args, **named)
        if tree._writer._storage is not None:
            tree._writer._storage._open_connection().execute("PRAGMA query_only = ON")
        return tree

    monkeypatch.setattr(DeltaTree, "open", without_room)
    tree, forgotten = open_emptied_tree(str(path.parent), identity=IDENTITY)
    assert (tree.nodes(), len(forgotten)) == ((), 1)
    tree.insert(fresh_draft([1, 2, 3]))
    assert len(warnings_of(caplog)) == 1


def test_a_store_in_use_is_refused(path: Path) -> None:
    """Early and late, with the ways out."""
    folder = str(path.parent)
    check_not_in_use(folder)
    check_not_in_use(None)
    with DeltaTree.open(path, identity=IDENTITY):
        with pytest.raises(StoreError, match="another store path"):
            check_not_in_use(folder)
        with pytest.raises(StoreError, match="another store path"):
            open_tree(folder, identity=IDENTITY, loss="")


def test_null_is_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Asked for, so not warned of."""
    open_tree(None, identity=IDENTITY, loss="").insert(fresh_draft([1, 2, 3]))
    assert open_emptied_tree(None, identity=IDENTITY)[1] == []
    assert warnings_of(caplog) == []
