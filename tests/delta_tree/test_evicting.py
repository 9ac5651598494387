"""What leaves the tree, in which order, and what is protected."""

import pytest

from delta_tree import (
    DeltaTree,
    NodeId,
    PinnedNodeError,
    UnknownNodeError,
)
from tests.delta_tree.drafts import GONE
from tests.delta_tree.fake_prompts import (
    BYTES_PER_TOKEN,
    NAMESPACE,
    child_draft,
    fresh_draft,
)


def test_evicting_an_inner_node_moves_its_children_up(tree: DeltaTree) -> None:
    """Its child then descends from its grandparent."""
    root = tree.insert(fresh_draft(list(range(60)))).node
    inner = tree.insert(child_draft(root, 50, list(range(100, 120)))).node
    leaf = tree.insert(child_draft(inner, 60, list(range(200, 220)))).node
    gone = tree.evict(inner.node_id)
    assert (gone.num_nodes, gone.freed_segments, gone.freed_bytes) == (1, (), 0)
    assert tree.ancestors(leaf.node_id) == (root.node_id,)
    assert tree.children(root.node_id) == (leaf.node_id,)


def test_evicting_a_root_makes_its_children_roots(tree: DeltaTree) -> None:
    """Without a grandparent a child becomes a root, and keeps the KV it refers to."""
    root = tree.insert(fresh_draft(list(range(40)))).node
    leaf = tree.insert(child_draft(root, 30, [101])).node
    assert tree.evict(root.node_id).freed_segments == ()
    assert tree.ancestors(leaf.node_id) == ()
    assert tree.evict(leaf.node_id).freed_bytes == 41 * BYTES_PER_TOKEN
    assert tree.stats().num_segments == 0


def test_a_pinned_node_is_not_evicted(tree: DeltaTree) -> None:
    """A pinned node is no candidate and refuses eviction until it is unpinned."""
    node = tree.insert(fresh_draft([1, 2])).node
    tree.pin(node.node_id)
    assert tree.next_to_evict() is None
    with pytest.raises(PinnedNodeError, match="unpin it first"):
        tree.evict(node.node_id)
    tree.unpin(node.node_id)
    assert tree.next_to_evict() is tree.node(node.node_id)
    assert tree.evict(node.node_id).num_nodes == 1


def test_several_nodes_are_pinned_or_none(tree: DeltaTree) -> None:
    """One that is unknown leaves the others as they were."""
    first, second = (tree.insert(fresh_draft([i])).node.node_id for i in (1, 2))
    with pytest.raises(UnknownNodeError):
        tree.pin(first, GONE)
    assert tree.pinned() == frozenset()
    tree.pin(first, second)
    assert tree.pinned() == {first, second}
    tree.unpin(first, second)
    assert tree.stats().num_pinned == 0


def test_the_least_recently_used_go_first(tree: DeltaTree) -> None:
    """The order is that of last use, per namespace if asked."""
    first, second = (tree.insert(fresh_draft([i])).node.node_id for i in (1, 2))
    other = tree.insert(fresh_draft([3], namespace="tenant-b")).node.node_id
    tree.touch(first)
    for namespaces, order in ((None, [second, other, first]), ([NAMESPACE], [second, first])):
        for index, node_id in enumerate(order):
            found = tree.next_to_evict(namespaces, without=order[:index])
            assert found is tree.node(node_id)
    assert tree.node(first).num_hits == 1


def test_what_gave_to_others_stays_longer(tree: DeltaTree) -> None:
    """Counted in lengths of the node itself; a use without giving leaves the worth as it is."""
    little, much, nothing = (tree.insert(fresh_draft([i] * 10)).node.node_id for i in (1, 2, 3))
    other = tree.insert(fresh_draft([3] * 10, namespace="tenant-b")).node.node_id
    tree.touch(much, num_copied=20)
    tree.touch(little, num_copied=5)
    tree.touch(nothing)
    tree.touch(NodeId(5), num_copied=5)  # gone
    for namespaces, order in (
        (None, [other, nothing, little, much]),
        ([NAMESPACE, "tenant-b"], [other, nothing, little, much]),
        ([NAMESPACE], [nothing, little, much]),
        ([], []),
    ):
        for index, node_id in enumerate(order):
            assert tree.next_to_evict(namespaces, without=order[:index]) is tree.node(node_id)
        assert tree.next_to_evict(namespaces, without=order) is None


def test_what_only_the_parent_has_does_not_become_younger(tree: DeltaTree) -> None:
    """Of a prompt whose beginning was continued the rest leaves in its turn; the beginning is its child's."""
    parent = tree.insert(fresh_draft(list(range(40)))).node
    other = tree.insert(fresh_draft([1, 2, 3])).node
    tree.touch(parent.node_id, share=0.5)
    assert tree.next_to_evict() is tree.node(other.node_id)
    child = tree.insert(child_draft(parent, 20, [101, 102])).node
    assert tree.next_to_evict() is tree.node(parent.node_id)
    assert tree.next_to_evict([NAMESPACE]) is tree.node(parent.node_id)
    tree.touch(parent.node_id)
    tree.insert(child_draft(parent, 20, [103]))
    assert tree.next_to_evict() is tree.node(other.node_id), "all of it was used"
    tree.evict(other.node_id)
    assert tree.next_to_evict() is tree.node(child.node_id)


def test_an_administrators_eviction_ages_no_node(tree: DeltaTree) -> None:
    """It did not leave for room."""
    good, better = (tree.insert(fresh_draft([i] * 10)).node.node_id for i in (1, 2))
    tree.touch(good, num_copied=50)
    tree.touch(better, num_copied=500)
    tree.evict(better)
    newcomer = tree.insert(fresh_draft([3] * 10)).node
    assert tree.next_to_evict() is newcomer


def test_old_merits_fade(tree: DeltaTree) -> None:
    """What leaves for room sets the floor for those that are used from then on."""
    once = tree.insert(fresh_draft([1] * 10)).node.node_id
    tree.touch(once, num_copied=25)
    tree.insert(fresh_draft([2] * 10))
    evicted = []
    for number in range(3, 11):
        tree.insert(fresh_draft([number] * 10))
        leaving = tree.next_to_evict()
        assert leaving is not None
        tree.age(leaving.node_id, None)
        tree.evict(leaving.node_id)
        evicted.append(int(leaving.token_ids[0]))
    assert evicted == [2, 3, 4, 5, 6, 7, 1, 8]


def test_a_purge_leaves_nothing_of_its_namespace(tree: DeltaTree) -> None:
    """A purge drops pinned nodes too, frees every segment, and touches no other namespace."""
    root = tree.insert(fresh_draft([1, 2, 3])).node
    tree.insert(child_draft(root, 2, [9]))
    tree.pin(root.node_id)
    other = tree.insert(fresh_draft([1, 2, 3], namespace="tenant-b")).node
    gone = tree.purge_nodes(node.node_id for node in tree.nodes(NAMESPACE))
    assert (gone.num_nodes, len(gone.freed_segments), gone.freed_bytes) == (2, 2, 40)
    assert tree.nodes() == (other,)
    assert tree.nodes(NAMESPACE) == ()
    assert {segment.namespace for segment in tree.segments()} == {"tenant-b"}
    assert tree.purge_nodes(node.node_id for node in tree.nodes()).num_nodes == 1
    assert tree.stats().num_segments == tree.purge_nodes(node.node_id for node in tree.nodes()).num_nodes == 0


def test_nodes_without_their_kv_are_discarded(tree: DeltaTree) -> None:
    """At the start, nodes whose segments are gone leave; children that have theirs stay."""
    root = tree.insert(fresh_draft(list(range(40)))).node
    lost = tree.insert(child_draft(root, 30, [101, 102])).node
    leaf = tree.insert(child_draft(lost, 30, [103])).node
    tree.pin(lost.node_id)
    gone = lost.pieces.segment_ids - root.pieces.segment_ids
    alive = {s.segment_id for s in tree.segments()} - gone
    assert tree.discard_missing(alive) == 1
    assert {node.node_id for node in tree.nodes()} == {root.node_id, leaf.node_id}
    assert tree.ancestors(leaf.node_id) == (root.node_id,)
    assert tree.discard_missing(alive) == 0


def test_unknown_nodes_are_named(tree: DeltaTree) -> None:
    """Asking for a node that is not there says so; touching one does nothing."""
    for ask in (tree.node, tree.pin, tree.evict, tree.children, tree.owned_bytes):
        with pytest.raises(UnknownNodeError, match="no node 77"):
            ask(GONE)
    tree.touch(GONE)
    assert tree.get(GONE) is None
