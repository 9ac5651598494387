"""Files that are refused: damaged, of another program, model or version, or read-only."""

import random
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from delta_tree import (
    DeltaTree,
    DeltaTreeError,
    StoreCorruptError,
    StoreForeignError,
    StoreMismatchError,
    StoreMissingError,
    StoreReadOnlyError,
    StoreUnavailableError,
)
from tests.delta_tree.fake_prompts import fresh_draft
from tests.delta_tree.stores import IDENTITY, content, edit


def test_another_identity_is_refused(filled: Path) -> None:
    """A store of another model is refused, naming both, and saying what to do."""
    with pytest.raises(StoreMismatchError, match=r"model-a@main.*model-b.*kvshare evict --all"):
        DeltaTree.open(filled, identity="model-b@main float16")
    DeltaTree.open(filled, identity=IDENTITY).close()


def test_a_newer_version_is_refused(filled: Path) -> None:
    """A store of a later schema is refused, not guessed at."""
    edit(filled, "PRAGMA user_version = 5")
    with pytest.raises(StoreMismatchError, match=r"schema version 5.*schema version 4"):
        DeltaTree.open(filled, identity=IDENTITY)


def test_another_programs_database_is_left_alone(path: Path) -> None:
    """A SQLite file of something else is refused and not a byte of it changed."""
    path.parent.mkdir()
    edit(path, "CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(StoreMismatchError, match="another program"):
        DeltaTree.open(path, identity=IDENTITY)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda blob: b"not a database at all, but long enough to be read as one" * 90,
        lambda blob: blob[: len(blob) // 2],
        lambda blob: blob[:4096],
        lambda blob: blob[:50],
        lambda blob: blob[:16] + bytes(84) + blob[100:],
        lambda blob: blob[:4096] + random.Random(1).randbytes(8192) + blob[12288:],
    ],
    ids=["text", "half", "first page", "half a header", "no header", "two pages of noise"],
)
def test_damaged_files_are_refused_with_a_remedy(filled: Path, damage: Callable[[bytes], bytes]) -> None:
    """A damaged file raises StoreCorruptError that says what to do, the second time too."""
    filled.write_bytes(damage(filled.read_bytes()))
    for _ in range(2):
        with pytest.raises(StoreCorruptError, match=r"tree\.sqlite.*move the file.*evict --all"):
            DeltaTree.open(filled, identity=IDENTITY)


def test_no_flipped_bits_change_what_is_loaded(filled: Path) -> None:
    """Whatever bits flip, the store is refused or loads just what was stored."""
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        before = content(tree)
    blob = filled.read_bytes()
    rng = random.Random(7)
    num_refused = 0
    for _ in range(80):
        damaged = bytearray(blob)
        damaged[rng.randrange(len(blob))] ^= 1 << rng.randrange(8)
        filled.write_bytes(damaged)
        try:
            with DeltaTree.open(filled, identity=IDENTITY) as tree:
                assert content(tree) == before
        except (StoreCorruptError, StoreMismatchError):
            num_refused += 1
    assert num_refused > 20


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE nodes SET pieces = zeroblob(24)",
        "UPDATE nodes SET exact_length = 3",
        "UPDATE nodes SET pinned = 1 - pinned",
        "UPDATE segments SET generation = 1",
        "DELETE FROM segments",
        "DELETE FROM nodes WHERE node_id = (SELECT min(node_id) FROM nodes)",
        "DELETE FROM meta",
        "DROP TABLE parents",
        "UPDATE parents SET parent = (SELECT min(node_id) FROM nodes)",
        "UPDATE parents SET parent = node_id, row_sum = 2 * node_id",
        "INSERT INTO segments SELECT 1, namespace, 0, 1, 0, 1, checksum, 1 FROM segments LIMIT 1",
    ],
)
def test_rows_that_do_not_fit_together_are_refused(filled: Path, statement: str) -> None:
    """What SQLite holds for whole but no tree would have written is refused as damaged."""
    edit(filled, statement)
    with pytest.raises(StoreCorruptError):
        DeltaTree.open(filled, identity=IDENTITY)


def test_an_empty_file_is_a_new_store(path: Path) -> None:
    """A process killed before its first write leaves an empty file; that is no damage."""
    path.parent.mkdir()
    path.touch()
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        assert tree.insert(fresh_draft([1])).created


def test_read_only_reads_and_refuses_changes(filled: Path) -> None:
    """The CLI can look at a stopped server's store, and cannot change it."""
    before = filled.read_bytes()
    with DeltaTree.open(filled, identity=IDENTITY, read_only=True) as tree:
        assert tree.stats().num_nodes == 12
        tree.touch(tree.nodes()[0].node_id)
        for change in (
            lambda: tree.purge_nodes(node.node_id for node in tree.nodes()),
            lambda: tree.insert(fresh_draft([1])),
            lambda: tree.unpin(tree.nodes()[-1].node_id),
            lambda: tree.evict(tree.nodes()[0].node_id, lazily=True),
        ):
            with pytest.raises(StoreReadOnlyError, match="read-only"):
                change()
        assert tree.stats().num_nodes == 12
    assert filled.read_bytes() == before


def test_read_only_needs_a_store(path: Path) -> None:
    """Looking at a store that is not there creates nothing."""
    with pytest.raises(StoreMissingError, match="no store here yet"):
        DeltaTree.open(path, identity=IDENTITY, read_only=True)
    assert not path.parent.exists()


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    """A path that cannot be a file is refused by name."""
    with pytest.raises(StoreUnavailableError, match="Is a directory"):
        DeltaTree.open(tmp_path, identity=IDENTITY)


def test_another_programs_file_is_told_apart(path: Path) -> None:
    """It has its own class of error, so that it is not moved away."""
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    with pytest.raises(StoreForeignError):
        DeltaTree.open(path, identity=IDENTITY)


def test_errors_of_a_store_have_one_root(path: Path) -> None:
    """A caller that catches DeltaTreeError catches all of them, foreign ones included."""
    path.parent.mkdir()
    path.write_bytes(b"x" * 5000)
    with pytest.raises(DeltaTreeError) as caught:
        DeltaTree.open(path, identity=IDENTITY)
    assert isinstance(caught.value.__cause__, sqlite3.Error)


@pytest.mark.parametrize("read_only", [False, True])
def test_without_an_identity_no_store_is_made(path: Path, read_only: bool) -> None:
    """Whoever does not know the model has nothing to create a store for."""
    with pytest.raises(StoreMissingError):
        DeltaTree.open(path, identity=None, read_only=read_only)
    assert not path.exists()
