"""An administrator's questions over a real tree: what the documents say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from delta_tree import DeltaTree, NodeId
from kvshare.errors import RequestError
from tests.delta_tree.fake_prompts import child_draft, fresh_draft
from tests.kvshare.admin.documents import document_of
from tests.kvshare.cli.family import BYTES_PER_TOKEN, OURS, THEIRS, Family


def ask(store: DeltaTree, what: str, **arguments: object) -> dict[str, Any]:
    return document_of(store, what, arguments)


def numbers_in(document: object) -> set[object]:
    """Every scalar of a document."""
    if isinstance(document, dict):
        return set().union(*map(numbers_in, document.values())) if document else set()
    if isinstance(document, list):
        return set().union(*map(numbers_in, document)) if document else set()
    return {document}


def test_stats_count_each_namespace_and_their_sum(store: DeltaTree, family: Family) -> None:
    """The totals are those of all namespaces together, each of which has its own row."""
    document = ask(store, "stats")
    rows = {row["namespace"]: row for row in document["namespaces"]}
    assert rows.keys() == {OURS, THEIRS}
    assert (rows[OURS]["num_nodes"], rows[OURS]["max_depth"]) == (3, 3)
    assert rows[OURS]["num_bytes"] == 125 * BYTES_PER_TOKEN
    assert document["totals"]["num_bytes"] == 175 * BYTES_PER_TOKEN


def test_stats_of_one_namespace_say_nothing_of_others(store: DeltaTree, family: Family) -> None:
    """A namespace is chosen by enough of its first digits, and only it is counted."""
    document = ask(store, "stats", namespace=THEIRS[:6])
    assert [row["namespace"] for row in document["namespaces"]] == [THEIRS]
    assert document["totals"]["num_nodes"] == 1


def test_stats_of_an_empty_store(store: DeltaTree) -> None:
    """An empty store has no namespaces and counts zero."""
    document = ask(store, "stats")
    assert document["namespaces"] == []
    assert document["totals"]["num_nodes"] == 0


def test_tree_nests_children_below_their_parents(store: DeltaTree, family: Family) -> None:
    """Roots hold their children, down to the last, with own and inherited bytes."""
    roots = {root["id"]: root for root in ask(store, "tree")["roots"]}
    assert roots.keys() == {family.root, family.stranger}
    (child,) = roots[family.root]["children"]
    (grand,) = child["children"]
    assert (child["id"], grand["id"]) == (family.child, family.grand)
    assert (child["own_bytes"], child["subtree_bytes"]) == (0, 25 * BYTES_PER_TOKEN)
    assert grand["own_bytes"] == 5 * BYTES_PER_TOKEN
    assert grand["children"] == []


def test_tree_says_how_many_children_it_leaves_out(store: DeltaTree, family: Family) -> None:
    """At the depth that was asked for children are counted but not shown."""
    (root,) = ask(store, "tree", depth="1", root=str(family.root))["roots"]
    assert (root["num_children"], root["children"]) == (1, [])


def test_tree_of_a_namespace_shows_only_its_roots(store: DeltaTree, family: Family) -> None:
    """Another namespace's prompts are not listed, nor reached through root."""
    assert [root["id"] for root in ask(store, "tree", namespace=OURS)["roots"]] == [family.root]
    assert ask(store, "tree", namespace=OURS, root=family.stranger)["roots"] == []


@pytest.mark.parametrize(("sort", "first"), [("bytes", "root"), ("tokens", "root"), ("hits", "stranger")])
def test_tree_puts_first_what_was_asked_for(store: DeltaTree, family: Family, sort: str, first: str) -> None:
    """Siblings are ordered by the chosen figure, largest first."""
    store.touch(family.stranger)
    roots = ask(store, "tree", sort=sort)["roots"]
    assert roots[0]["id"] == getattr(family, first)


def test_tree_comes_in_pages(store: DeltaTree, family: Family) -> None:
    """`limit` and `skip` choose among roots, or below `root`; how many there are is always said."""
    for number in range(3):
        store.insert(fresh_draft([number + 900, *range(number)], namespace=OURS, parent=family.root))
    pages = [ask(store, "tree", sort="tokens", depth=1, limit=1, **skip) for skip in ({}, {"skip": 1})]
    assert [page["num_roots"] for page in pages] == [2, 2]
    assert [page["roots"][0]["id"] for page in pages] == [family.root, family.stranger]
    whole, first, rest = (
        ask(store, "tree", root=family.root, sort="tokens", depth=2, **page)["roots"][0]
        for page in ({}, {"limit": 3}, {"limit": 3, "skip": 3})
    )
    assert [each["num_children"] for each in (whole, first, rest)] == [4, 4, 4]
    ids = [[child["id"] for child in page["children"]] for page in (whole, first, rest)]
    assert (ids[1] + ids[2], len(ids[1])) == (ids[0], 3)


def test_a_prompt_says_what_it_shares(store: DeltaTree, family: Family) -> None:
    """The KV that it points to, of which `own_bytes` is its own."""
    (root,) = ask(store, "tree", root=family.root)["roots"]
    (child,) = root["children"]
    assert child["num_bytes"] == store.node(NodeId(family.child)).num_tokens * BYTES_PER_TOKEN
    assert child["own_bytes"] == 0


def test_ages_are_read_from_the_clock(
    store: DeltaTree, family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Age counts from when a prompt was stored, idleness from its last use; no clock makes them negative."""
    monkeypatch.setattr("time.time", lambda: 1060.0)
    entry = ask(store, "node", id=family.root)
    assert (entry["age_s"], entry["idle_s"]) == (60.0, 60.0)
    monkeypatch.setattr("time.time", lambda: 999.0)
    (root, _) = ask(store, "tree")["roots"]
    assert root["age_s"] == 0.0


def test_node_tells_where_its_kv_lies(store: DeltaTree, family: Family) -> None:
    """Pieces cover the prompt, with their shift from where they were computed and who else refers to them."""
    document = ask(store, "node", id=str(family.grand))
    pieces = document["pieces"]
    assert [(piece["start"], piece["end"]) for piece in pieces] == [(0, 30), (30, 50), (50, 85), (85, 90)]
    assert [piece["shift"] for piece in pieces] == [-10, -10, -10, 0]
    assert [piece["generation"] for piece in pieces] == [0, 0, 0, 1]
    assert [piece["num_references"] for piece in pieces] == [3, 2, 3, 1]
    assert pieces[0]["num_bytes"] == 30 * BYTES_PER_TOKEN


def test_node_tells_its_family(store: DeltaTree, family: Family) -> None:
    """Parents come nearest first; children, edits and shared tokens are named."""
    document = ask(store, "node", id=family.grand)
    assert document["parents"] == [family.child, family.root]
    assert document["edits"]["counts"] == {"keep": 85, "insert": 0, "replace": 5, "delete": 10}
    shared = {entry["id"]: entry["num_tokens"] for entry in document["shared_with"]}
    assert shared == {family.child: 85, family.root: 65}
    assert ask(store, "node", id=family.root)["edits"] is None
    root = ask(store, "node", id=family.root)
    assert (root["num_children"], root["children"]) == (1, [family.child])


def test_of_a_large_family_some_are_named(store: DeltaTree, family: Family) -> None:
    """A prompt that thousands copied must not make a page of thousands."""
    root = store.node(NodeId(family.root))
    for number in range(130):
        store.insert(child_draft(root, 20, [1000 + number]))
    document = ask(store, "node", id=family.root)
    assert (document["num_children"], len(document["children"])) == (131, 100)
    assert (document["num_shared_with"], len(document["shared_with"])) == (132, 100)


def test_diff_gives_spans_that_cover_both_prompts(store: DeltaTree, family: Family) -> None:
    """Edits follow each other without a hole in either prompt, and the kept share is that of each."""
    document = ask(store, "diff", a=family.root, b=family.child)
    ops = document["edits"]["ops"]
    assert [op["op"] for op in ops] == ["keep", "replace", "keep"]
    assert [op["source"] for op in ops] == [[0, 40], [40, 60], [60, 100]]
    assert document["num_common_prefix"] == 40
    assert document["kept_share_of_a"] == pytest.approx(0.8)


def test_diff_counts_short_matches_as_changes(store: DeltaTree, family: Family) -> None:
    """A match below min_run is no keep, except the common prefix."""
    document = ask(store, "diff", a=family.root, b=family.child, min_run=50)
    assert document["edits"]["counts"]["keep"] == 40


def test_diff_stays_inside_a_namespace(store: DeltaTree, family: Family) -> None:
    """Two namespaces are not compared: that would tell one of the other."""
    with pytest.raises(RequestError, match=r"b: .*same namespace") as refused:
        ask(store, "diff", a=family.root, b=family.stranger)
    assert refused.value.code == "namespace_mismatch"


@pytest.mark.parametrize("what", ["stats", "tree", "node", "diff"])
def test_no_answer_carries_token_ids(store: DeltaTree, family: Family, what: str) -> None:
    """Documents are JSON of spans and counts; the prompts' token ids are not in them."""
    arguments = {"node": {"id": family.child}, "diff": {"a": family.root, "b": family.grand}}.get(what, {})
    document = ask(store, what, **arguments)
    tokens = {int(token) for stored in store.nodes() for token in stored.token_ids}
    assert json.loads(json.dumps(document)) == document
    assert numbers_in(document).isdisjoint(tokens)
