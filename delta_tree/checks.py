"""
Checks that drafts and nodes are consistent. They run before every insertion and after every load.

A node is consistent if its pieces cover its whole prompt and refer to segments of its own namespace only.
"""

from collections.abc import Callable, Iterable

from delta_tree.errors import InvalidNodeError
from delta_tree.forest import Forest
from delta_tree.node import MAX_INT64, UNKNOWN_DEVIATION, Node, NodeId, Segment, SegmentId

SegmentLookup = Callable[[SegmentId], Segment | None]


def check_parent(forest: Forest, namespace: str, node_id: NodeId | None) -> None:
    """Check that the parent of a new node is in the tree and the namespace. Raises InvalidNodeError."""
    if node_id is not None:
        parent = forest.nodes.get(node_id)
        if parent is None:
            raise InvalidNodeError(f"the parent, node {node_id}, is not in the tree")
        if parent.namespace != namespace:
            raise InvalidNodeError(f"the parent, node {node_id}, is in another namespace")


def segments_with(forest: Forest, namespace: str, added: Iterable[Segment]) -> SegmentLookup:
    """
    Check the segments to be added, and return a look-up over them and the tree's segments.

    Raises:  InvalidNodeError if an added segment is not valid, not new, or of another namespace
    """
    new: dict[SegmentId, Segment] = {}
    for segment in added:
        check_segment(segment)
        if segment.namespace != namespace:
            raise InvalidNodeError(f"segment {segment.segment_id} belongs to another namespace")
        if segment.segment_id in new or segment.segment_id in forest.segments:
            raise InvalidNodeError(f"segment {segment.segment_id} is there twice")
        new[segment.segment_id] = segment
    return lambda segment_id: new.get(segment_id) or forest.segments.get(segment_id)


def check_node(node: Node, segment_of: SegmentLookup) -> None:
    """Check that a node is a whole prompt over segments of its own namespace. Raises InvalidNodeError."""
    if not node.namespace:
        raise InvalidNodeError("the node has no namespace; give it one")
    if not node.num_tokens or node.pieces.num_tokens != node.num_tokens:
        raise InvalidNodeError(
            f"the pieces cover {node.pieces.num_tokens} tokens of a prompt of {node.num_tokens}"
        )
    if not 0 <= node.exact_length <= node.num_tokens:
        raise InvalidNodeError(f"exact_length {node.exact_length} does not fit {node.num_tokens} tokens")
    is_exact = node.exact_length == node.num_tokens
    if not 0 <= node.deviation <= (0 if is_exact else UNKNOWN_DEVIATION):
        raise InvalidNodeError(
            f"deviation {node.deviation}: expected 0 to {UNKNOWN_DEVIATION}, and 0 where all KV is exact"
        )
    for start, segment_id, offset, length in node.pieces.rows():
        segment, end = segment_of(segment_id), offset + length
        if segment is None:
            raise InvalidNodeError(f"segment {segment_id} is in neither tree nor draft")
        if segment.namespace != node.namespace:
            raise InvalidNodeError(f"segment {segment_id} belongs to another namespace")
        if end > segment.num_tokens:
            raise InvalidNodeError(
                f"a piece ends at token {end} of segment {segment_id}, which has {segment.num_tokens}"
            )
        stored_at = segment.first_position + offset
        if start < node.exact_length and (segment.generation or stored_at != start):
            raise InvalidNodeError(
                f"exact_length {node.exact_length} covers position {start}, whose KV is of "
                f"generation {segment.generation} and was computed for position {stored_at}"
            )


def check_segment(segment: Segment) -> None:
    """Check that a segment's numbers are in range. Raises InvalidNodeError."""
    counts = (segment.first_position, segment.generation, segment.num_bytes)
    if segment.num_tokens <= 0 or min(counts) < 0 or max(counts) > MAX_INT64:
        raise InvalidNodeError(
            f"segment {segment.segment_id} has {segment.num_tokens} tokens at "
            f"{segment.first_position}, generation {segment.generation}, "
            f"{segment.num_bytes} bytes"
        )
    if not 0 < segment.segment_id <= MAX_INT64 or not 0 <= segment.checksum < 2**64:
        raise InvalidNodeError("a segment id needs 63 bits above 0, its checksum 64 unsigned bits")


def check_forest(forest: Forest) -> None:
    """Check all segments and nodes, and that every segment belongs to a node. Raises InvalidNodeError."""
    for segment in forest.segments.values():
        check_segment(segment)
    for node in forest.nodes.values():
        check_node(node, forest.segments.get)
        for child in forest.lineage.children(node.node_id):
            if forest.nodes[child].namespace != node.namespace:
                raise InvalidNodeError("the parent is in another namespace")
    used = {s for node in forest.nodes.values() for s in node.pieces.segment_ids}
    if used != forest.segments.keys():
        raise InvalidNodeError("a segment belongs to no node")


def quality(node: Node, segment_of: SegmentLookup) -> tuple[int, float, int]:
    """Rate a node's KV, to compare two nodes of one prompt; larger is better."""
    staleness = 0
    for piece in node.pieces:
        segment = segment_of(piece.segment_id)
        assert segment is not None  # the node has been checked
        staleness += segment.generation * piece.length
    return node.exact_length, -node.deviation, -staleness
