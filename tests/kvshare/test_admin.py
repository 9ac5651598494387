"""The operator's questions over a real tree: what the documents say, and which arguments are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from delta_tree import DeltaTree, NodeId
from kvshare.admin import QUESTIONS
from kvshare.errors import RequestError
from tests.kvshare.cli.family import BYTES_PER_TOKEN, IDENTITY, OURS, THEIRS, Family, grow


@pytest.fixture
def store() -> Iterator[DeltaTree]:
    with DeltaTree.open(None, identity=IDENTITY, clock=lambda: 1000.0) as opened:
        yield opened


@pytest.fixture
def family(store: DeltaTree) -> Family:
    return grow(store)


def ask(store: DeltaTree, what: str, **arguments: object) -> dict[str, Any]:
    return QUESTIONS[what](store, arguments).document


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
    assert ask(store, "node", id=family.root)["children"] == [family.child]


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


def test_evicting_a_node_frees_what_nobody_else_needs(store: DeltaTree, family: Family) -> None:
    """The node goes, its own segment is freed, and both are named for whoever holds KV and index."""
    (tail,) = (
        s.segment_id for s in store.segments() if store.reference_count(s.segment_id) == 1 and s.generation
    )
    answer = QUESTIONS["evict"](store, {"node": family.grand})
    assert answer.document["freed_bytes"] == 5 * BYTES_PER_TOKEN
    assert answer.freed_segments == (tail,)
    assert answer.removed_nodes == ((OURS, family.grand),)
    assert store.get(family.grand) is None


def test_a_dry_run_tells_the_truth_and_changes_nothing(store: DeltaTree, family: Family) -> None:
    """What a dry run announces is what the eviction then does."""
    announced = QUESTIONS["evict"](store, {"node": family.grand, "dry_run": "true"})
    assert (announced.freed_segments, announced.removed_nodes) == ((), ())
    assert store.get(family.grand) is not None
    done = ask(store, "evict", node=family.grand)
    assert {**announced.document, "dry_run": False} == done


def test_evicting_in_bulk_is_a_dry_run_unless_told(store: DeltaTree, family: Family) -> None:
    """Without dry_run=false a namespace, or everything, is only counted."""
    assert ask(store, "evict", namespace=OURS)["num_nodes"] == 3
    assert ask(store, "evict", all=True)["num_nodes"] == 4
    assert len(store.nodes()) == 4


def test_evicting_a_namespace_leaves_others(store: DeltaTree, family: Family) -> None:
    """Only the prompts of the namespace are dropped, pinned ones too."""
    store.pin(family.root)
    answer = QUESTIONS["evict"](store, {"namespace": OURS, "dry_run": "false"})
    assert answer.document["freed_bytes"] == 125 * BYTES_PER_TOKEN
    assert len(answer.removed_nodes) == 3
    assert [left.node_id for left in store.nodes()] == [family.stranger]


def test_evicting_everything_empties_the_store(store: DeltaTree, family: Family) -> None:
    """all=true with dry_run=false leaves nothing."""
    assert ask(store, "evict", all="true", dry_run=False)["num_nodes"] == 4
    assert store.nodes() == ()


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_pinned_node_is_not_evicted(store: DeltaTree, family: Family, dry_run: bool) -> None:
    """A pin holds against the eviction of that node, and a dry run says so."""
    store.pin(family.grand)
    with pytest.raises(RequestError, match="pinned") as refused:
        ask(store, "evict", node=family.grand, dry_run=dry_run)
    assert refused.value.code == "node_pinned"
    assert store.get(family.grand) is not None


def test_what_is_to_be_pinned_is_named_for_whoever_knows_the_memory(store: DeltaTree, family: Family) -> None:
    """The question itself pins nothing; bytes are those of all segments that the prompts point to, once."""
    answer = QUESTIONS["pin"](store, {"node": family.grand})
    assert answer.to_pin == (family.grand,)
    assert answer.document == {"num_nodes": 1, "num_bytes": 125 * BYTES_PER_TOKEN}
    answer = QUESTIONS["pin"](store, {"namespace": OURS[:8]})
    assert set(answer.to_pin) == {family.root, family.child, family.grand}
    assert answer.document == {"num_nodes": 3, "num_bytes": 125 * BYTES_PER_TOKEN}
    assert not store.pinned()


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ({"all": "true"}, set()),
        ({"namespace": OURS}, {"stranger"}),
        ({"namespace": THEIRS}, {"root", "grand"}),
    ],
)
def test_unpinning_leaves_what_it_does_not_name(
    store: DeltaTree, family: Family, arguments: dict[str, object], left: set[str]
) -> None:
    """Only what was pinned is counted, and nothing is dropped."""
    pinned = {"root": family.root, "grand": family.grand, "stranger": family.stranger}
    store.pin(*map(NodeId, pinned.values()))
    assert ask(store, "unpin", **arguments)["num_nodes"] == 3 - len(left)
    assert store.pinned() == {pinned[name] for name in left}
    assert len(store.nodes()) == 4


def test_an_unpinned_node_can_be_evicted(store: DeltaTree, family: Family) -> None:
    store.pin(NodeId(family.grand))
    assert ask(store, "unpin", node=family.grand) == {"num_nodes": 1, "num_bytes": 125 * BYTES_PER_TOKEN}
    assert ask(store, "unpin", node=family.grand) == {"num_nodes": 0, "num_bytes": 0}
    assert ask(store, "evict", node=family.grand)["num_nodes"] == 1


@pytest.mark.parametrize(
    ("what", "arguments", "param"),
    [
        ("stats", {"namespace": "aaaaaaa0"}, "namespace"),
        ("stats", {"namespace": "a"}, "namespace"),
        ("stats", {"tenant": "acme"}, "tenant"),
        ("tree", {"depth": "0"}, "depth"),
        ("tree", {"depth": "1000"}, "depth"),
        ("tree", {"sort": "colour"}, "sort"),
        ("tree", {"root": "12"}, "root"),
        ("node", {}, "id"),
        ("node", {"id": "one"}, "id"),
        ("node", {"id": True}, "id"),
        ("node", {"id": "1_0"}, "id"),
        ("node", {"id": " 5"}, "id"),
        ("node", {"id": "9" * 500}, "id"),
        ("diff", {"a": "12", "b": "13"}, "a"),
        ("evict", {}, "node"),
        ("evict", {"all": "false"}, "node"),
        ("evict", {"all": "true", "namespace": OURS}, "node"),
        ("evict", {"all": "perhaps"}, "all"),
        ("evict", {"all": "yes"}, "all"),
        ("evict", {"namespace": OURS, "dryrun": "true"}, "dryrun"),
        ("evict", {"namespace": ""}, "namespace"),
        ("pin", {}, "node"),
        ("pin", {"node": "12", "namespace": OURS}, "node"),
        ("pin", {"node": "12"}, "node"),
        ("pin", {"all": True}, "all"),
        ("unpin", {}, "node"),
        ("unpin", {"node": "12", "all": True}, "node"),
        ("unpin", {"namespace": "cccc"}, "namespace"),
    ],
)
def test_a_wrong_argument_is_refused_by_name(
    store: DeltaTree, family: Family, what: str, arguments: dict[str, object], param: str
) -> None:
    """The message begins with the argument, the error carries it, and nothing has changed."""
    with pytest.raises(RequestError, match=f"^{param}: ") as refused:
        ask(store, what, **arguments)
    assert refused.value.param == param
    assert len(store.nodes()) == 4


def test_a_node_that_is_not_there_has_a_code(store: DeltaTree, family: Family) -> None:
    """By which scripts tell it from a wrong argument."""
    for what, name in (("node", "id"), ("tree", "root"), ("evict", "node"), ("pin", "node")):
        with pytest.raises(RequestError) as refused:
            ask(store, what, **{name: 12_345})
        assert (refused.value.code, refused.value.param) == ("node_not_found", name)
