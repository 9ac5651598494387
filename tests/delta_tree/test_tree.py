"""The tree: what is inserted is found, improved and shared."""

import tracemalloc
from dataclasses import replace

import pytest

from delta_tree import (
    DeltaTree,
    NodeDraft,
    Piece,
    PieceTable,
    UnknownSegmentError,
    token_ids,
)
from tests.delta_tree.drafts import draft_over
from tests.delta_tree.fake_prompts import (
    BYTES_PER_TOKEN,
    NAMESPACE,
    child_draft,
    fresh_draft,
    segment,
    whole,
)


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
