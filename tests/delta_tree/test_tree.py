"""The tree of prompts, in memory."""

import tracemalloc
from dataclasses import replace

import pytest

from delta_tree import (
    DeltaTree,
    InvalidNodeError,
    NodeDraft,
    NodeId,
    Piece,
    PieceTable,
    PinnedNodeError,
    Segment,
    SegmentId,
    UnknownNodeError,
    UnknownSegmentError,
    token_ids,
)
from tests.delta_tree.fake_prompts import (
    BYTES_PER_TOKEN,
    NAMESPACE,
    child_draft,
    fresh_draft,
    segment,
    whole,
)

GONE = NodeId(77)


@pytest.fixture
def tree() -> DeltaTree:
    """An empty tree in memory whose clock ticks once per look."""
    ticks = iter(range(1, 1000))
    return DeltaTree.open(None, identity="model", clock=lambda: float(next(ticks)))


def draft_over(
    ids: list[int], segments: list[Segment], *, exact_length: int = 0, parent: NodeId | None = None
) -> NodeDraft:
    """A draft whose pieces are whole segments, all of them new."""
    table = PieceTable(map(whole, segments))
    return NodeDraft(NAMESPACE, token_ids(ids), parent, table, tuple(segments), exact_length)


def test_an_inserted_prompt_is_found(tree: DeltaTree) -> None:
    """A prompt is found by its tokens in its namespace, and in no other."""
    made = tree.insert(fresh_draft([1, 2, 3]))
    assert made.created
    assert tree.find(NAMESPACE, [1, 2, 3]) is made.node
    assert tree.get(made.node.node_id) is tree.node(made.node.node_id) is made.node
    assert tree.find(NAMESPACE, [1, 2]) is None
    assert tree.find("tenant-b", [1, 2, 3]) is None


def test_identical_prompts_are_one_node(tree: DeltaTree) -> None:
    """Inserting a known prompt touches its node, and the new KV is not needed."""
    first = tree.insert(fresh_draft([1, 2, 3]))
    again = fresh_draft([1, 2, 3])
    second = tree.insert(again)
    assert (second.created, second.node.node_id) == (False, first.node.node_id)
    assert second.freed_segments == tuple(again.pieces.segment_ids)
    assert (second.node.num_hits, tree.stats().num_segments) == (1, 1)
    assert second.node.last_used_at > first.node.last_used_at


def test_the_same_prompt_in_two_namespaces_is_two_nodes(tree: DeltaTree) -> None:
    """Namespaces share nothing, not even the fact that a prompt is known."""
    mine = tree.insert(fresh_draft([1, 2, 3]))
    theirs = tree.insert(fresh_draft([1, 2, 3], namespace="tenant-b"))
    assert theirs.created
    assert mine.node.node_id != theirs.node.node_id
    assert tree.stats("tenant-b").num_nodes == 1


def test_a_longer_exact_prefix_replaces_the_pieces(tree: DeltaTree) -> None:
    """Better KV for a known prompt takes the place of the old, which is freed."""
    stale = [segment(2), segment(2, first_position=2, generation=1)]
    known = tree.insert(draft_over([1, 2, 3, 4], stale, exact_length=2)).node
    better = tree.insert(fresh_draft([1, 2, 3, 4]))
    assert (better.created, better.node.node_id) == (False, known.node_id)
    assert better.node.exact_length == 4
    assert set(better.freed_segments) == {s.segment_id for s in stale}
    assert tree.stats().num_bytes == 4 * BYTES_PER_TOKEN


def test_a_lower_generation_replaces_the_pieces_and_a_higher_does_not(tree: DeltaTree) -> None:
    """With equally long exact prefixes, the fresher KV is kept."""
    middle = segment(4, generation=2)
    tree.insert(draft_over([1, 2, 3, 4], [middle]))
    worse, better = segment(4, generation=3), segment(4, generation=1)
    assert tree.insert(draft_over([1, 2, 3, 4], [worse])).freed_segments == (worse.segment_id,)
    assert tree.insert(draft_over([1, 2, 3, 4], [better])).freed_segments == (middle.segment_id,)
    assert tree.segments() == (better,)


def test_kv_that_is_less_off_replaces_the_pieces(tree: DeltaTree) -> None:
    """Of two ways to an answer the one that is expected to deviate less is kept, however deep its copies."""
    old, new = segment(4, generation=1), segment(4, generation=2)
    tree.insert(replace(draft_over([1, 2, 3, 4], [old]), deviation=0.008))
    again = tree.insert(replace(draft_over([1, 2, 3, 4], [new]), deviation=0.002))
    assert again.freed_segments == (old.segment_id,)
    assert tree.node(again.node.node_id).deviation == 0.002


def test_what_is_shortened_to_its_exact_part_deviates_no_more(tree: DeltaTree) -> None:
    """The end that was off has left."""
    parts = [segment(2), segment(2, first_position=2, generation=1)]
    known = tree.insert(replace(draft_over([1, 2, 3, 4], parts, exact_length=2), deviation=0.005)).node
    tree.shorten(known.node_id, 3)
    assert tree.node(known.node_id).deviation == 0.005
    tree.shorten(known.node_id, 2)
    assert tree.node(known.node_id).deviation == 0


def test_replaced_pieces_stay_for_those_who_share_them(tree: DeltaTree) -> None:
    """A segment that a child still refers to survives its first owner's improvement."""
    own = segment(4, generation=1)
    root = tree.insert(draft_over([1, 2, 3, 4], [own])).node
    tree.insert(child_draft(root, 3, [9]))
    assert tree.insert(fresh_draft([1, 2, 3, 4])).freed_segments == ()
    assert tree.reference_count(own.segment_id) == 1


def test_segments_that_no_piece_uses_are_handed_back(tree: DeltaTree) -> None:
    """New segments without a piece are not stored, and reported as freed."""
    used, unused = segment(2), segment(5)
    draft = replace(draft_over([1, 2], [used]), new_segments=(used, unused))
    assert tree.insert(draft).freed_segments == (unused.segment_id,)
    with pytest.raises(UnknownSegmentError, match="no segment"):
        tree.segment(unused.segment_id)


def test_children_share_the_segments_of_their_parent(tree: DeltaTree) -> None:
    """A child costs the KV of its changes."""
    root = tree.insert(fresh_draft(list(range(40)))).node
    child = tree.insert(child_draft(root, 30, [101, 102])).node
    assert tree.children(root.node_id) == (child.node_id,)
    assert tree.reference_count(next(iter(root.pieces.segment_ids))) == 2
    assert tree.owned_bytes(root.node_id) == 0
    assert tree.owned_bytes(child.node_id) == 2 * BYTES_PER_TOKEN
    assert tree.subtree_bytes(root.node_id) == 42 * BYTES_PER_TOKEN
    (shared,) = tree.shared_with(child.node_id)
    assert (shared.node_id, shared.num_tokens) == (root.node_id, 30)


def test_stats_add_up(tree: DeltaTree) -> None:
    """Figures count each segment once and each prompt in full."""
    root = tree.insert(fresh_draft(list(range(40)))).node
    child = tree.insert(child_draft(root, 30, [101, 102])).node
    tree.insert(child_draft(child, 31, [7]))
    tree.pin(root.node_id)
    stats = tree.stats()
    assert (stats.num_nodes, stats.num_roots, stats.num_pinned) == (3, 1, 1)
    assert (stats.num_segments, stats.num_tokens, stats.num_stored_tokens) == (3, 104, 43)
    assert (stats.num_bytes, stats.max_depth) == (43 * BYTES_PER_TOKEN, 3)
    assert tree.stats("tenant-b").max_depth == 0


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
    gone = tree.purge(NAMESPACE)
    assert (gone.num_nodes, len(gone.freed_segments), gone.freed_bytes) == (2, 2, 40)
    assert tree.nodes() == (other,)
    assert tree.nodes(NAMESPACE) == ()
    assert {segment.namespace for segment in tree.segments()} == {"tenant-b"}
    assert tree.purge_all().num_nodes == 1
    assert tree.stats().num_segments == tree.purge_all().num_nodes == 0


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


SEGMENT = segment(3, segment_id=SegmentId(5))
GOOD = draft_over([1, 2, 3], [SEGMENT], exact_length=3)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (replace(GOOD, namespace=""), "namespace"),
        (replace(GOOD, token_ids=token_ids([1, 2])), "cover 3 tokens of a prompt of 2"),
        (replace(GOOD, token_ids=token_ids([]), pieces=PieceTable([])), "prompt of 0"),
        (replace(GOOD, exact_length=4), "exact_length 4"),
        (replace(GOOD, deviation=0.01), "deviation 0.01"),
        (replace(GOOD, exact_length=2, deviation=-0.01), "deviation -0.01"),
        (replace(GOOD, exact_length=2, deviation=float("nan")), "deviation nan"),
        (replace(GOOD, new_segments=()), "neither tree nor draft"),
        (replace(GOOD, new_segments=(SEGMENT, SEGMENT)), "there twice"),
        (replace(GOOD, new_segments=(replace(SEGMENT, namespace="b"),)), "another namespace"),
        (replace(GOOD, new_segments=(replace(SEGMENT, generation=1),)), "of generation 1"),
        (replace(GOOD, new_segments=(replace(SEGMENT, first_position=4),)), "for position 4"),
        (replace(GOOD, new_segments=(replace(SEGMENT, num_tokens=2),)), "ends at token 3"),
        (replace(GOOD, new_segments=(replace(SEGMENT, num_bytes=-1),)), "-1 bytes"),
        (replace(GOOD, new_segments=(replace(SEGMENT, checksum=-1),)), "checksum"),
        (replace(GOOD, parent=GONE), "not in the tree"),
    ],
)
def test_drafts_that_are_no_whole_prompt_are_refused(tree: DeltaTree, draft: NodeDraft, message: str) -> None:
    """A bad draft raises InvalidNodeError, says what is wrong, and changes nothing."""
    with pytest.raises(InvalidNodeError, match=message):
        tree.insert(draft)
    assert tree.stats().num_nodes == tree.stats().num_segments == 0


def test_nothing_crosses_namespaces(tree: DeltaTree) -> None:
    """Neither a parent nor a segment of another namespace is accepted."""
    theirs = tree.insert(fresh_draft([1, 2, 3], namespace="tenant-b")).node
    with pytest.raises(InvalidNodeError, match="another namespace"):
        tree.insert(fresh_draft([1, 2], parent=theirs.node_id))
    (piece,) = theirs.pieces
    draft = NodeDraft(NAMESPACE, token_ids([1, 2, 3]), None, PieceTable([piece]), (), 0)
    with pytest.raises(InvalidNodeError, match="another namespace"):
        tree.insert(draft)
    assert tree.stats(NAMESPACE).num_nodes == 0


def test_a_segment_is_inserted_once(tree: DeltaTree) -> None:
    """A draft cannot bring a segment that the tree already has: ids are never used twice."""
    tree.insert(GOOD)
    with pytest.raises(InvalidNodeError, match="there twice"):
        tree.insert(draft_over([9, 9, 9], [SEGMENT]))


def test_a_piece_may_be_any_part_of_a_known_segment(tree: DeltaTree) -> None:
    """A prompt can be made of stored KV alone, relocated as it may be."""
    root = tree.insert(fresh_draft([1, 2, 3, 4])).node
    (piece,) = root.pieces
    table = PieceTable([Piece(piece.segment_id, 2, 2), Piece(piece.segment_id, 0, 2)])
    node = tree.insert(NodeDraft(NAMESPACE, token_ids([3, 4, 1, 2]), None, table, (), 0)).node
    assert tree.reference_count(piece.segment_id) == 2
    assert tree.shared_with(node.node_id)[0].num_tokens == 4


def test_a_stored_prompt_costs_little_memory() -> None:
    """2,000 tokens with 10 % of them changed in four places take at most 12 KB of metadata."""
    tree = DeltaTree.open(None, identity="model")
    root = tree.insert(fresh_draft(list(range(2000)))).node
    (base,) = root.pieces
    num_nodes = 100
    tracemalloc.start()
    try:
        for index in range(num_nodes):
            ids, rows, own, at = list(range(2000)), [], [], 0
            for start in (200, 700, 1200, 1700):
                ids[start : start + 50] = range(5000 + index, 5050 + index)
                own.append(segment(50, first_position=start, generation=1))
                rows += [Piece(base.segment_id, at, start - at), whole(own[-1])]
                at = start + 50
            rows.append(Piece(base.segment_id, at, 2000 - at))
            draft = NodeDraft(NAMESPACE, token_ids(ids), root.node_id, PieceTable(rows), tuple(own), 200)
            tree.insert(draft)
            del ids, rows, own, draft
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes / num_nodes < 12_000
