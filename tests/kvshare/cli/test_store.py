"""`kvshare stats`, `tree`, `node`, `diff`, `evict` on the metadata of a stopped server."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from delta_tree import DeltaTree, NodeId
from kvshare.cli.views import draw
from tests.kvshare.cli.conftest import Cli
from tests.kvshare.cli.costs import COSTS
from tests.kvshare.cli.family import IDENTITY, OURS, THEIRS, Family

NO_TOTALS = dict.fromkeys(
    (
        "num_nodes",
        "num_pinned",
        "max_depth",
        "num_tokens",
        "num_stored_tokens",
        "num_segments",
        "num_bytes",
    ),
    0,
)


def set_pragma(store: Path, assignment: str) -> None:
    with closing(sqlite3.connect(store / "tree.sqlite3")) as connection:
        connection.execute(f"PRAGMA {assignment}")


def test_stats_as_json(cli: Cli, store: Path, family: Family) -> None:
    """stdout is one JSON document with totals and one row per namespace; stderr is empty."""
    outcome = cli("stats", "--store", store, "--format", "json")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.document["totals"]["num_nodes"] == 4
    assert {row["namespace"] for row in outcome.document["namespaces"]} == {OURS, THEIRS}


def test_the_store_of_the_config_is_read_by_default(cli: Cli, store: Path, family: Family) -> None:
    """Without --store and --url the store of the settings is opened."""
    config = store.parent / "kvshare.yaml"
    config.write_text(f"store: {{path: {store}}}\n")
    outcome = cli("stats", "--config", config, "--format", "json")
    assert outcome.document["totals"]["num_nodes"] == 4


def test_tree_as_json(cli: Cli, store: Path, family: Family) -> None:
    """Options reach the question: one root, cut at the asked depth."""
    outcome = cli("tree", family.root, "--depth", 2, "--store", store, "--format", "json")
    (root,) = outcome.document["roots"]
    assert root["id"] == family.root
    assert root["children"][0]["num_children"] == 1
    assert root["children"][0]["children"] == []


def test_tree_on_a_terminal_names_every_node(cli: Cli, store: Path, family: Family) -> None:
    """The drawing shows every node, without colour codes where stdout is no terminal."""
    outcome = cli("tree", "--store", store)
    assert outcome.code == 0
    for node_id in (family.root, family.child, family.grand, family.stranger):
        assert str(node_id) in outcome.stdout
    assert "\x1b" not in outcome.stdout


def test_node_tells_parents_and_pieces(cli: Cli, store: Path, family: Family) -> None:
    """A node is shown with its chain of parents, and without its tokens."""
    outcome = cli("node", family.grand, "--store", store)
    assert outcome.code == 0
    assert str(family.root) in outcome.stdout
    assert "910000" not in outcome.stdout  # a token id of the prompt


def test_diff_of_two_nodes(cli: Cli, store: Path, family: Family) -> None:
    """The edits are listed with their spans."""
    outcome = cli("diff", family.root, family.child, "--store", store)
    assert outcome.code == 0
    assert "40-60" in outcome.stdout


def test_evicting_a_node_takes_it_out_of_the_store(cli: Cli, store: Path, family: Family) -> None:
    """One node is evicted without further questions, and its child moves to its parent."""
    outcome = cli("evict", family.child, "--store", store, "--format", "json")
    assert (outcome.code, outcome.document["dry_run"]) == (0, False)
    with DeltaTree.open(store / "tree.sqlite3", identity=IDENTITY, read_only=True) as tree:
        assert tree.children(family.root) == (family.grand,)


def test_evicting_everything_waits_for_yes(cli: Cli, store: Path, family: Family) -> None:
    """--all only announces; with --yes it drops, and another model may then use the store."""
    announced = cli("evict", "--all", "--store", store, "--format", "json")
    assert announced.document["dry_run"] is True
    assert "--yes" in announced.stderr
    done = cli("evict", "--all", "--yes", "--store", store, "--format", "json")
    assert done.document == {**announced.document, "dry_run": False}
    DeltaTree.open(store / "tree.sqlite3", identity="another model").close()


def test_quiet_leaves_only_the_data(cli: Cli, store: Path, family: Family) -> None:
    """With -q the note about the dry run is not written."""
    outcome = cli("-q", "evict", "--all", "--store", store)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "would evict" in outcome.stdout


@pytest.mark.parametrize("arguments", [("stats",), ("evict", "--all", "--yes")])
def test_a_missing_store_is_one_clear_line(cli: Cli, store: Path, arguments: tuple[str, ...]) -> None:
    """Exit code 1 and one line that names the file; nothing is created."""
    outcome = cli(*arguments, "--store", store)
    assert (outcome.code, outcome.stdout) == (1, "")
    assert outcome.stderr.count("\n") == 1
    assert "tree.sqlite3" in outcome.stderr
    assert not store.exists()


def test_a_store_that_a_server_holds_is_refused(cli: Cli, store: Path, family: Family) -> None:
    """While another process has the store open, the message says so and what to do; nothing changes."""
    with DeltaTree.open(store / "tree.sqlite3", identity=IDENTITY) as held:
        outcome = cli("evict", "--all", "--yes", "--store", store)
        assert outcome.code == 1
        assert "another process" in outcome.stderr
        assert "Traceback" not in outcome.stderr
        assert len(held.nodes()) == 4


def test_a_damaged_store_is_refused_and_can_be_dropped(cli: Cli, store: Path, family: Family) -> None:
    """The message names the way out, `evict --all`, and that way works."""
    file = store / "tree.sqlite3"
    file.write_bytes(b"not a database" * 100)
    refused = cli("tree", "--store", store)
    assert refused.code == 1
    assert "kvshare evict --all" in refused.stderr
    dropped = cli("evict", "--all", "--yes", "--store", store, "--format", "json")
    assert (dropped.code, file.exists()) == (0, False)
    assert "damaged" in dropped.document["unreadable"]


def test_a_store_of_a_newer_version_is_refused(cli: Cli, store: Path, family: Family) -> None:
    """A schema this version does not know is left as it is, unless everything is to be evicted."""
    set_pragma(store, "user_version = 99")
    outcome = cli("stats", "--store", store)
    assert outcome.code == 1
    assert "schema version 99" in outcome.stderr
    assert cli("evict", "--all", "--yes", "--store", store).code == 0
    assert not (store / "tree.sqlite3").exists()


def test_a_file_of_another_program_is_never_deleted(cli: Cli, store: Path, family: Family) -> None:
    """A database that is no KVShare store stays where it is, even if everything is to be evicted."""
    set_pragma(store, "application_id = 7")
    outcome = cli("evict", "--all", "--yes", "--store", store)
    assert outcome.code == 1
    assert "not a KVShare store" in outcome.stderr
    assert (store / "tree.sqlite3").exists()


def test_an_unknown_node_fails(cli: Cli, store: Path, family: Family) -> None:
    """Exit code 1 and a message with the id."""
    outcome = cli("node", 12345, "--store", store)
    assert outcome.code == 1
    assert "12345" in outcome.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("node", "one"),
        ("tree", "--sort", "colour"),
        ("evict",),
        ("evict", "--all", "--yes", "--dry-run"),
        ("stats", "--url", "http://127.0.0.1:1", "--store", "x"),
        ("stats", "--url", "file:///etc/hosts"),
        ("stats", "--config", "missing.yaml"),
    ],
)
def test_wrong_usage_is_exit_code_2(cli: Cli, arguments: tuple[str, ...]) -> None:
    """Usage and config errors end with 2, a message, nothing on stdout and no traceback."""
    outcome = cli(*arguments)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize(("tokens", "said"), [(700, "a plan pays from 700 tokens on"), (None, "never pays")])
@pytest.mark.parametrize(
    ("measured", "origin"),
    [
        ([], "assumed: prefill, pass, load, lookup, embedding (on a CPU)"),
        (["prefill"], "measured: prefill; assumed: pass, load, lookup, embedding (on a CPU)"),
        (["load", "prefill"], "measured: prefill, load; assumed: pass, lookup, embedding (on a CPU)"),
        (
            ["embedding", "load", "lookup", "pass", "prefill"],
            "measured: prefill, pass, load, lookup, embedding (on a CPU)",
        ),
    ],
)
def test_what_a_running_server_has_measured_is_shown(
    capsys: pytest.CaptureFixture[str], tokens: int | None, said: str, measured: list[str], origin: str
) -> None:
    """Each rate in times of prompts, and which of them are measured."""
    costs = {**COSTS, "break_even_tokens": tokens, "measured": measured}
    draw("stats", {"totals": NO_TOTALS, "namespaces": [], "costs": costs})
    shown = " ".join(capsys.readouterr().out.split())
    assert origin in shown
    assert "a full prefill of 1,024 tokens 30 ms, 8,192 tokens 222 ms" in shown
    assert "loads from memory 20.0 GB/s, a pass 5.0 ms, the lookup of 8,192 tokens 5.8 ms" in shown
    assert said in shown


@pytest.mark.parametrize("costs", [{}, None, {"pass_s": 0.1}, {**COSTS, "loads": 1.0}])
def test_costs_of_another_version_are_not_shown(
    capsys: pytest.CaptureFixture[str], costs: dict[str, object] | None
) -> None:
    """The rest is."""
    draw("stats", {"totals": NO_TOTALS, "namespaces": [], "costs": costs})
    assert "all" in capsys.readouterr().out


def test_pins_of_a_stopped_store_are_undone_and_not_made(cli: Cli, store: Path, family: Family) -> None:
    """Only a running server knows how much may be pinned."""
    with DeltaTree.open(store / "tree.sqlite3", identity=IDENTITY) as tree:
        tree.pin(NodeId(family.root))
    refused = cli("pin", family.child, "--store", store)
    assert (refused.code, "--url" in refused.stderr) == (1, True)
    undone = cli("unpin", "--all", "--store", store, "--format", "json")
    assert (undone.code, undone.document["num_nodes"]) == (0, 1)
    with DeltaTree.open(store / "tree.sqlite3", identity=IDENTITY, read_only=True) as tree:
        assert len(tree.nodes()) == 4
        assert not tree.pinned()
