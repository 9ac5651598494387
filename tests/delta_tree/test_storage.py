"""The tree on disk: what is there after reopening, and when changes are written."""

import stat
from pathlib import Path

import pytest

from delta_tree import (
    DeltaTree,
    NodeDraft,
    PieceTable,
    StoreUnavailableError,
    token_ids,
)
from delta_tree.storage import journal_mode_for
from tests.delta_tree.fake_prompts import NAMESPACE, child_draft, fresh_draft, segment, whole
from tests.delta_tree.stores import IDENTITY, content


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
    monkeypatch.setattr("delta_tree.writing._MAX_UNWRITTEN_USES", 3)
    with DeltaTree.open(path, identity=IDENTITY, clock=lambda: 5.0) as tree:
        ids = [tree.insert(fresh_draft([index])).node.node_id for index in range(3)]
        for node_id in ids:
            tree.touch(node_id)
        assert tree._writer._storage is not None
        assert [node.num_hits for node in tree._writer._storage.load().put_nodes] == [1, 1, 1]


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
        tree.purge_nodes(node.node_id for node in tree.nodes(NAMESPACE))
        files = list(path.parent.iterdir())
        assert files
        needle = token_ids(ids[450:460]).tobytes()
        assert not any(needle in file.read_bytes() for file in files)


@pytest.mark.parametrize("grandparent", [False, True])
def test_evicting_a_hub_writes_no_child_again(path: Path, grandparent: bool) -> None:
    """A template's 2,000 children change their parent in one statement; no prompt is written for it."""
    with DeltaTree.open(path, identity=IDENTITY) as tree:
        above = tree.insert(fresh_draft([7, 8])).node.node_id if grandparent else None
        hub = tree.insert(fresh_draft([1, 2, 3], parent=above)).node
        children = {tree.insert(child_draft(hub, 2, [9, i])).node.node_id for i in range(2000)}
        assert tree._writer._storage is not None
        statements: list[str] = []
        tree._writer._storage._open_connection().set_trace_callback(statements.append)
        tree.evict(hub.node_id)
        tree._writer._storage._open_connection().set_trace_callback(None)
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
        assert tree._writer._storage is not None
        assert len(tree._writer._storage.load().put_nodes) == 12
        tree.insert(fresh_draft([1]))
        assert len(tree._writer._storage.load().put_nodes) == 10
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
        assert tree._writer._storage is not None
        connection = tree._writer._storage._open_connection()
        connection.execute("PRAGMA query_only = ON")
        with pytest.raises(StoreUnavailableError):
            tree.insert(fresh_draft([1]))
        assert tree.stats().num_nodes == 11
        connection.execute("PRAGMA query_only = OFF")
        tree.insert(fresh_draft([1]))
        before = content(tree)
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        assert content(tree) == before


def test_a_failed_write_changes_nothing(filled: Path) -> None:
    """If a change cannot be stored it has not happened in memory either, and later ones can."""
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        before = content(tree)
        assert tree._writer._storage is not None
        connection = tree._writer._storage._open_connection()
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
    monkeypatch.setattr("delta_tree.writing._MAX_UNWRITTEN_USES", 1)
    with DeltaTree.open(filled, identity=IDENTITY) as tree:
        assert tree._writer._storage is not None
        tree._writer._storage._open_connection().execute("PRAGMA query_only = ON")
        for num_hits in (1, 2, 3):
            tree.touch(tree.nodes()[0].node_id)
            assert tree.nodes()[0].num_hits == num_hits
        tree._writer._storage._open_connection().execute("PRAGMA query_only = OFF")
        for _ in range(2):
            tree.touch(tree.nodes()[0].node_id)
    failed, works = caplog.messages
    assert failed.startswith("use counters are not stored: ")
    assert works == "use counters are stored again"


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


def test_an_administrator_opens_a_store_of_any_model(filled: Path) -> None:
    """Without an identity an existing store is taken as it is, to be read or emptied."""
    with DeltaTree.open(filled, identity=None) as tree:
        assert tree.stats().num_nodes > 0
        tree.purge_nodes(node.node_id for node in tree.nodes())
    with DeltaTree.open(filled, identity=None, read_only=True) as tree:
        assert tree.stats().num_nodes == 0
