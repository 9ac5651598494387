"""
What a draft must be to become a node, and which of its segments are needed.

Functions over a forest and a draft; they change neither.
"""

from collections.abc import Callable

from delta_tree.checks import check_segment
from delta_tree.errors import InvalidNodeError
from delta_tree.forest import Forest
from delta_tree.node import Node, NodeDraft, Segment, SegmentId


def parent_of(forest: Forest, draft: NodeDraft) -> Node | None:
    """
    The draft's parent, None for a root.

    Raises:  InvalidNodeError if it is not in the tree, or in another namespace
    """
    if draft.parent is None:
        return None
    parent = forest.nodes.get(draft.parent)
    if parent is None:
        raise InvalidNodeError(f"the parent, node {draft.parent}, is not in the tree")
    if parent.namespace != draft.namespace:
        raise InvalidNodeError(f"the parent, node {draft.parent}, is in another namespace")
    return parent


def check_new_segments(forest: Forest, draft: NodeDraft) -> None:
    """
    Refuse new segments that are impossible, foreign, or not new.

    Raises:  InvalidNodeError
    """
    seen: set[SegmentId] = set()
    for segment in draft.new_segments:
        check_segment(segment)
        if segment.namespace != draft.namespace:
            raise InvalidNodeError(f"segment {segment.segment_id} belongs to another namespace")
        if segment.segment_id in seen or segment.segment_id in forest.segments:
            raise InvalidNodeError(f"segment {segment.segment_id} is there twice")
        seen.add(segment.segment_id)


def segment_lookup(forest: Forest, draft: NodeDraft) -> Callable[[SegmentId], Segment | None]:
    """Segments of the draft and of the tree, by id."""
    new = {segment.segment_id: segment for segment in draft.new_segments}
    return lambda segment_id: new.get(segment_id) or forest.segments.get(segment_id)


def quality(node: Node, segment_of: Callable[[SegmentId], Segment | None]) -> tuple[int, int]:
    """What makes one way to hold a prompt's KV better than another; larger is better."""
    staleness = 0
    for piece in node.pieces:
        segment = segment_of(piece.segment_id)
        assert segment is not None  # the node has been checked
        staleness += segment.generation * piece.length
    return node.exact_length, -staleness


def divide(draft: NodeDraft) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The draft's new segments: those its pieces refer to, and the others."""
    used = draft.pieces.segment_ids
    needed = tuple(segment for segment in draft.new_segments if segment.segment_id in used)
    return needed, tuple(s for s in draft.new_segments if s.segment_id not in used)
