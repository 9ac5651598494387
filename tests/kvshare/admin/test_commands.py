"""An administrator's commands over a real tree: what they change, and what they leave to others."""

from __future__ import annotations

from typing import Any

import pytest

from delta_tree import DeltaTree, NodeId
from kvshare.admin import Evict, Pin, checked
from kvshare.errors import RequestError
from tests.kvshare.admin.documents import document_of
from tests.kvshare.cli.family import BYTES_PER_TOKEN, OURS, THEIRS, Family


def ask(store: DeltaTree, what: str, **arguments: object) -> dict[str, Any]:
    return document_of(store, what, arguments)


def test_evicting_a_node_frees_what_nobody_else_needs(store: DeltaTree, family: Family) -> None:
    """The node goes, its own segment is freed, and both are named for whoever holds KV and index."""
    (tail,) = (
        s.segment_id for s in store.segments() if store.reference_count(s.segment_id) == 1 and s.generation
    )
    result = checked(Evict, {"node": family.grand}).apply(store)
    assert result.document["freed_bytes"] == 5 * BYTES_PER_TOKEN
    assert result.freed_segments == (tail,)
    assert result.removed_nodes == ((OURS, family.grand),)
    assert store.get(family.grand) is None


def test_a_dry_run_tells_the_truth_and_changes_nothing(store: DeltaTree, family: Family) -> None:
    """What a dry run announces is what the eviction then does."""
    announced = checked(Evict, {"node": family.grand, "dry_run": "true"}).apply(store)
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
    result = checked(Evict, {"namespace": OURS, "dry_run": "false"}).apply(store)
    assert result.document["freed_bytes"] == 125 * BYTES_PER_TOKEN
    assert len(result.removed_nodes) == 3
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
    """The command itself pins nothing; bytes are those of all segments that the prompts point to, once."""
    result = checked(Pin, {"node": family.grand}).apply(store)
    assert result.to_pin == (family.grand,)
    assert result.document == {"num_nodes": 1, "num_bytes": 125 * BYTES_PER_TOKEN}
    result = checked(Pin, {"namespace": OURS[:8]}).apply(store)
    assert set(result.to_pin) == {family.root, family.child, family.grand}
    assert result.document == {"num_nodes": 3, "num_bytes": 125 * BYTES_PER_TOKEN}
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
