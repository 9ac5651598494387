"""The tree on disk: reopening, refusing what is not ours, and one writer."""

import random
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from delta_tree import (
    UNKNOWN_DEVIATION,
    DeltaTree,
    DeltaTreeError,
    NodeDraft,
    PieceTable,
    StoreCorruptError,
    StoreForeignError,
    StoreLockedError,
    StoreMismatchError,
    StoreMissingError,
    StoreReadOnlyError,
    StoreUnavailableError,
    check_unlocked,
    set_aside,
    token_ids,
)
from delta_tree.storage import APPLICATION_ID, journal_mode_for
from tests.delta_tree.fake_prompts import NAMESPACE, child_draft, fresh_draft, segment, whole

IDENTITY = "model-a@main float16"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a store may be made, in a folder that does not exist yet."""
    return tmp_path / "store" / "tree.sqlite"


@pytest.fixture
def filled(path: Path) -> Path:
    """A closed store of 12 prompts, each but the first a child of the one before."""
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        node = tree.insert(fresh_draft(list(range(200)))).node
        for index in range(11):
            node = tree.insert(child_draft(node, 190 - index, [1000 + index] * 5)).node
        tree.pin(node.node_id)
    return path


def content(tree: DeltaTree) -> list[tuple[object, ...]]:
    """All of a tree that reuse depends on."""
    return sorted(
        (
            n.node_id,
            n.namespace,
            n.token_ids.tobytes(),
            tree.ancestors(n.node_id),
            n.pieces.to_bytes(),
            n.exact_length,
            n.deviation,
            n.pinned,
            sorted(map(repr, (tree.segment(s) for s in n.pieces.segment_ids))),
        )
        for n in tree.nodes()
    )


def test_everything_is_there_after_reopening(path: Path) -> None:
    """Nodes, ids, ancestors, pieces, pins and segments survive closing, whatever their size."""
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        root = tree.insert(fresh_draft(list(range(100)))).node
        tree.insert(child_draft(root, 50, [2**31 - 1]))
        tree.pin(root.node_id)
        before = content(tree)
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        assert content(tree) == before
        with pytest.raises(ValueError, match="read-only"):
            tree.nodes()[0].token_ids[0] = 5


def test_use_counters_are_written_when_closing(path: Path) -> None:
    """Touches cost no transaction of their own, and are on disk after an orderly end."""
    with DeltaTree.open(path, identity=IDENTITY, clock=lambda: 5.0) as tree:
        node = tree.insert(fresh_draft([1, 2])).node
    with DeltaTree.open(path, identity=IDENTITY, clock=lambda: 9.0) as tree:
        tree.touch(node.node_id)
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        again = tree.node(node.node_id)
        assert (again.num_hits, again.created_at, again.last_used_at) == (1, 5.0, 9.0)


def test_many_touches_are_written_in_between(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long no change comes, use counters reach the disk in batches."""
    monkeypatch.setattr("delta_tree.tree._MAX_UNWRITTEN_USES", 3)
    with DeltaTree.open(path, identity=IDENTITY, clock=lambda: 5.0) as tree:
        ids = [tree.insert(fresh_draft([index])).node.node_id for index in range(3)]
        for node_id in ids:
            tree.touch(node_id)
        assert tree._storage is not None
        assert [node.num_hits for node in tree._storage.load().put_nodes] == [1, 1, 1]


def test_the_store_is_its_owners_only(path: Path) -> None:
    """A new folder and the file in it are closed to others: prompts are private."""
    with DeltaTree.open(path, identity=IDENTITY):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_purge_leaves_no_tokens_in_the_files(path: Path) -> None:
    """After a purge the token ids are not even in unused pages or the journal."""
    ids = [0x5EC2E7 + i for i in range(600)]
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        parent = tree.insert(fresh_draft(ids)).node
        tree.insert(child_draft(parent, 300, ids[400:]))
        tree.purge(NAMESPACE)
        files = list(path.parent.iterdir())
        assert files
        needle = token_ids(ids[450:460]).tobytes()
        assert not any(needle in file.read_bytes() for file in files)


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


@pytest.fixture
def old(path: Path) -> Path:
    """
    A store as version 1 wrote it.

        1 40 tokens     2 a child of 1, 3 another, pinned     4 a child of 2, used once     5 another tenant's
    """
    write_earlier(path, 1)
    return path


def write_earlier(path: Path, version: int) -> None:
    """A file as an earlier version wrote it."""
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.executescript(Path(__file__).with_name(f"store_of_version_{version}.sql").read_text())
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


def test_a_store_of_version_1_is_read(old: Path) -> None:
    """Prompts, their places, pieces, pins and counters are there; looking changes no byte."""
    before = old.read_bytes()
    with DeltaTree.open(old, identity=IDENTITY, read_only=True) as tree:
        assert [node.node_id for node in tree.nodes()] == [1, 2, 3, 4, 5]
        assert [tree.ancestors(node.node_id) for node in tree.nodes()] == [(), (1,), (1,), (2, 1), ()]
        assert [node.num_tokens for node in tree.nodes()] == [40, 32, 21, 34, 3]
        assert [node.num_hits for node in tree.nodes()] == [0, 0, 0, 1, 0]
        assert tree.pinned() == {3}
        assert {node.node_id: len(node.pieces) for node in tree.nodes()} == {1: 1, 2: 2, 3: 2, 4: 3, 5: 1}
    assert old.read_bytes() == before


def test_a_store_of_version_1_becomes_one_of_this_version(old: Path) -> None:
    """Opened to be changed it is written anew, and can be changed and opened again."""
    with DeltaTree.open(old, identity=IDENTITY, read_only=True) as tree:
        before = content(tree)
    with DeltaTree.open(old, identity=IDENTITY) as tree:
        assert content(tree) == before
    with DeltaTree.open(old, identity=IDENTITY) as tree:
        assert content(tree) == before
        tree.evict(tree.nodes()[1].node_id)
        assert tree.insert(fresh_draft([1, 2])).created
        before = content(tree)
    with DeltaTree.open(old, identity=IDENTITY) as tree:
        assert content(tree) == before


def test_a_damaged_store_of_version_1_is_left_as_it_is(old: Path) -> None:
    """What does not fit together is refused, not written anew."""
    edit(old, "UPDATE pieces SET start = start + 1 WHERE node_id = 4")
    before = old.read_bytes()
    with pytest.raises(StoreCorruptError, match="checksum"):
        DeltaTree.open(old, identity=IDENTITY)
    assert old.read_bytes() == before


def test_a_store_of_version_2_is_read_and_written_anew(path: Path) -> None:
    """Exact nodes stay exact; the others have an unknown deviation until they are computed again."""
    write_earlier(path, 2)
    with DeltaTree.open(path, identity=IDENTITY, read_only=True) as tree:
        *whole, edited = tree.nodes()
        assert len(whole) == 5
        is_exact = {node.node_id: node.exact_length == node.num_tokens for node in tree.nodes()}
        assert {True, False} == set(is_exact.values())
        for node in tree.nodes():
            assert node.deviation == (0.0 if is_exact[node.node_id] else UNKNOWN_DEVIATION)
        assert (edited.exact_length, edited.num_tokens) == (3, 5)
        assert tree.ancestors(edited.node_id) == (whole[-1].node_id,)
        before = content(tree)
    for _ in range(2):
        with DeltaTree.open(path, identity=IDENTITY) as tree:
            assert content(tree) == before


def test_a_store_of_version_3_has_sums_of_deviations(path: Path) -> None:
    """It knew the largest of as many deviations as there are generations: their sum is at most so many."""
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        of_generation = {}
        for generation in (0, 1, 3):
            draft = fresh_draft([generation, 8, 9])
            if generation:
                segments = tuple(replace(each, generation=generation) for each in draft.new_segments)
                draft = replace(draft, new_segments=segments, exact_length=0, deviation=0.01)
            of_generation[generation] = tree.insert(draft).node.node_id
    edit(path, "PRAGMA user_version = 3")
    for _ in range(2):  # read as an earlier version, then as this one
        with DeltaTree.open(path, identity=IDENTITY) as tree:
            found = {key: tree.node(node_id).deviation for key, node_id in of_generation.items()}
            assert found == {0: 0.0, 1: 0.01, 3: pytest.approx(0.03)}


@pytest.mark.parametrize("grandparent", [False, True])
def test_evicting_a_hub_writes_no_child_again(path: Path, grandparent: bool) -> None:
    """A template's 2,000 children change their parent in one statement; no prompt is written for it."""
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        above = tree.insert(fresh_draft([7, 8])).node.node_id if grandparent else None
        hub = tree.insert(fresh_draft([1, 2, 3], parent=above)).node
        children = {tree.insert(child_draft(hub, 2, [9, i])).node.node_id for i in range(2000)}
        assert tree._storage is not None
        statements: list[str] = []
        tree._storage._open_connection().set_trace_callback(statements.append)
        tree.evict(hub.node_id)
        tree._storage._open_connection().set_trace_callback(None)
        assert not [text for text in statements if "INSERT" in text or "UPDATE nodes" in text]
        assert len(statements) <= 6
        before = content(tree)
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        assert content(tree) == before
        parents = {tree.ancestors(child) for child in children}
        assert parents == {(above,) if above else ()}
        assert set(tree.children(above) if above else ()) == (children if above else set())


def test_lazy_evictions_are_written_with_the_next_change(filled: Path) -> None:
    """Until then the file still has the prompts; after it, what moved up because of them is right."""
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        line = [node.node_id for node in tree.nodes()]
        for node_id in (line[4], line[3], line[0]):
            tree.evict(node_id, lazily=True)
            assert tree.get(node_id) is None
        assert tree._storage is not None
        assert len(tree._storage.load().put_nodes) == 12
        tree.insert(fresh_draft([1]))
        assert len(tree._storage.load().put_nodes) == 10
        tree.evict(line[7], lazily=True)
        assert tree.ancestors(line[8]) == (line[6], line[5], line[2], line[1])
        before = content(tree)
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        assert content(tree) == before


def test_a_shortened_prompt_is_stored_short(filled: Path) -> None:
    """Lazily with the next change, which may make its old tokens a prompt again."""
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        node = tree.nodes()[2]
        tree.shorten(node.node_id, 1, lazily=True)
        again = tree.insert(fresh_draft(node.token_ids.tolist(), namespace=node.namespace)).node
        assert again.node_id != node.node_id
        before = content(tree)
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        assert content(tree) == before
        assert tree.node(node.node_id).num_tokens == 1
        assert tree.find(again.namespace, node.token_ids) is tree.node(again.node_id)


def test_lazy_evictions_outlast_a_write_that_fails(filled: Path) -> None:
    """They are made in memory; the next change that can be stored takes them along."""
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        tree.evict(tree.nodes()[3].node_id, lazily=True)
        assert tree._storage is not None
        connection = tree._storage._open_connection()
        connection.execute("PRAGMA query_only = ON")
        with pytest.raises(StoreUnavailableError):
            tree.insert(fresh_draft([1]))
        assert tree.stats().num_nodes == 11
        connection.execute("PRAGMA query_only = OFF")
        tree.insert(fresh_draft([1]))
        before = content(tree)
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        assert content(tree) == before


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
            tree.purge_all,
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


@pytest.mark.parametrize("read_only", [False, True])
def test_a_second_process_is_refused(filled: Path, read_only: bool) -> None:
    """While one process writes, any other is turned away with a clear message."""
    program = (
        "import sys\nfrom pathlib import Path\nfrom delta_tree import *\n"
        "try:\n"
        f"    DeltaTree.open(Path(sys.argv[1]), identity={IDENTITY!r}, read_only={read_only})\n"
        "except StoreLockedError as exc:\n    sys.exit(str(exc))\n"
    )
    with DeltaTree.open(filled, identity=IDENTITY):
        second = subprocess.run(
            [sys.executable, "-c", program, str(filled)],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    assert second.returncode == 1
    assert "another process has this store open" in second.stderr


def test_a_second_tree_in_this_process_is_refused(filled: Path) -> None:
    """The lock also holds between two trees of one process."""
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        with pytest.raises(StoreLockedError):
            DeltaTree.open(filled, identity=IDENTITY)
        assert tree.insert(fresh_draft([1])).created


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    """A path that cannot be a file is refused by name."""
    with pytest.raises(StoreUnavailableError, match="Is a directory"):
        DeltaTree.open(tmp_path, identity=IDENTITY)


def test_a_failed_write_changes_nothing(filled: Path) -> None:
    """If a change cannot be stored it has not happened in memory either, and later ones can."""
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        before = content(tree)
        assert tree._storage is not None
        connection = tree._storage._open_connection()
        pages = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {pages}")  # the disk is full
        with pytest.raises(StoreUnavailableError, match="full"):
            tree.insert(fresh_draft(list(range(50_000))))
        assert content(tree) == before
        connection.execute(f"PRAGMA max_page_count = {pages * 100}")
        assert tree.insert(fresh_draft(list(range(50_000)))).created
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        assert tree.stats().num_nodes == 13


def test_a_closed_tree_refuses_changes(path: Path) -> None:
    """Closing twice is fine; a change after it is refused, not lost in silence."""
    tree = DeltaTree.open(path, identity=IDENTITY)
    tree.close()
    tree.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        tree.insert(fresh_draft([1]))
    assert tree.nodes() == ()


def test_use_counters_never_fail_a_request(
    filled: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Counters that cannot be written are lost. The log says so once, and when they are stored again."""
    monkeypatch.setattr("delta_tree.tree._MAX_UNWRITTEN_USES", 1)
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        assert tree._storage is not None
        tree._storage._open_connection().execute("PRAGMA query_only = ON")
        for num_hits in (1, 2, 3):
            tree.touch(tree.nodes()[0].node_id)
            assert tree.nodes()[0].num_hits == num_hits
        tree._storage._open_connection().execute("PRAGMA query_only = OFF")
        for _ in range(2):
            tree.touch(tree.nodes()[0].node_id)
    failed, works = caplog.messages
    assert failed.startswith("use counters are not stored: ")
    assert works == "use counters are stored again"


@pytest.mark.parametrize("blob", [None, b"", b"no database" * 999])
def test_a_store_can_be_set_aside_in_any_state(filled: Path, blob: bytes | None) -> None:
    """The last one is kept, with its bytes and its mode; a new one can begin."""
    for _ in range(2):
        if blob is not None:
            filled.write_bytes(blob)
        before = filled.read_bytes()
        aside = set_aside(filled)
        assert aside.read_bytes() == before
        assert stat.S_IMODE(aside.stat().st_mode) == 0o600
        assert not filled.exists()
        with DeltaTree.open(filled, identity="model-b") as tree:
            assert tree.nodes() == ()
    names = {path.name.removesuffix("-journal") for path in filled.parent.iterdir()}
    assert names == {filled.name, aside.name}


def test_a_journal_is_set_aside_with_its_store(filled: Path) -> None:
    """An earlier one's journal is never taken for a later one's, nor is one left for the next store."""
    journal, old = (filled.with_name(filled.name + suffix) for suffix in ("-journal", ".old-journal"))
    old.write_bytes(b"of an earlier store")
    set_aside(filled)
    assert not old.exists() or old.read_bytes() == b""
    filled.write_bytes(b"damaged" * 999)
    journal.write_bytes(b"its journal")
    set_aside(filled)
    assert not journal.exists()


def test_a_store_in_use_is_not_set_aside(filled: Path) -> None:
    """It is not moved under a running server, and the error comes before any weights are loaded."""
    with DeltaTree.open(filled, identity=IDENTITY):
        for refuse in (set_aside, check_unlocked):
            with pytest.raises(StoreLockedError):
                refuse(filled)
    assert filled.exists()


@pytest.mark.parametrize("blob", [None, b"", b"no database" * 999])
def test_a_store_that_is_not_open_is_unlocked(filled: Path, blob: bytes | None) -> None:
    """In whatever state it is, it is left as it is."""
    if blob is not None:
        filled.write_bytes(blob)
    before = filled.read_bytes()
    check_unlocked(filled)
    check_unlocked(filled.with_name("missing"))
    assert filled.read_bytes() == before
    assert not filled.with_name("missing").exists()


def test_another_programs_file_is_told_apart(path: Path) -> None:
    """It has its own class of error, so that it is not moved away."""
    path.parent.mkdir()
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (a)")
    connection.close()
    with pytest.raises(StoreForeignError):
        DeltaTree.open(path, identity=IDENTITY)


def test_a_tree_tells_what_it_was_written_for(filled: Path) -> None:
    """The identity that it was opened with first."""
    with DeltaTree.open(filled, identity=None) as tree:
        assert tree.identity == IDENTITY
    assert DeltaTree.open(None, identity=IDENTITY).identity is None


def test_improved_pieces_survive_reopening(path: Path) -> None:
    """A node whose KV was replaced by better is stored with the new pieces alone."""
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        stale = segment(3, generation=2)
        ids = token_ids([1, 2, 3])
        tree.insert(NodeDraft(NAMESPACE, ids, None, PieceTable([whole(stale)]), (stale,), 0))
        better = tree.insert(fresh_draft([1, 2, 3])).node
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        assert tree.nodes()[0].pieces == better.pieces
        assert tree.stats().num_segments == 1


@pytest.mark.parametrize(
    ("version", "mode"),
    [
        ((3, 40, 1), "TRUNCATE"),
        ((3, 44, 5), "TRUNCATE"),
        ((3, 44, 6), "WAL"),
        ((3, 45, 0), "TRUNCATE"),
        ((3, 50, 6), "TRUNCATE"),
        ((3, 50, 7), "WAL"),
        ((3, 51, 2), "TRUNCATE"),
        ((3, 51, 3), "WAL"),
        ((4, 0, 0), "WAL"),
    ],
)
def test_wal_is_used_where_it_is_sound(version: tuple[int, int, int], mode: str) -> None:
    """SQLite releases without the fix for the WAL-reset corruption get a rollback journal."""
    assert journal_mode_for(version) == mode


def test_errors_of_a_store_have_one_root(path: Path) -> None:
    """A caller that catches DeltaTreeError catches all of them, foreign ones included."""
    path.parent.mkdir()
    path.write_bytes(b"x" * 5000)
    with pytest.raises(DeltaTreeError) as caught:
        DeltaTree.open(path, identity=IDENTITY)
    assert isinstance(caught.value.__cause__, sqlite3.Error)


def edit(path: Path, statement: str) -> None:
    """Change the file behind the tree's back."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(statement)
    connection.close()


def test_an_administrator_opens_a_store_of_any_model(filled: Path) -> None:
    """Without an identity an existing store is taken as it is, to be read or emptied."""
    with DeltaTree.open(filled, identity=None) as tree:
        assert tree.stats().num_nodes > 0
        tree.purge_all()
    with DeltaTree.open(filled, identity=None, read_only=True) as tree:
        assert tree.stats().num_nodes == 0


@pytest.mark.parametrize("read_only", [False, True])
def test_without_an_identity_no_store_is_made(path: Path, read_only: bool) -> None:
    """Whoever does not know the model has nothing to create a store for."""
    with pytest.raises(StoreMissingError):
        DeltaTree.open(path, identity=None, read_only=read_only)
    assert not path.exists()
