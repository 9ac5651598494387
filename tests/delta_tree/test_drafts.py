"""Which drafts the tree refuses: those that are not a whole prompt over segments of their namespace."""

from dataclasses import replace

import pytest

from delta_tree import (
    DeltaTree,
    InvalidNodeError,
    NodeDraft,
    Piece,
    PieceTable,
    SegmentId,
    token_ids,
)
from tests.delta_tree.drafts import GONE, draft_over
from tests.delta_tree.fake_prompts import (
    NAMESPACE,
    fresh_draft,
    segment,
)

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
