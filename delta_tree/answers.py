"""
What the tree answers: the outcome of a change, and figures over many nodes.

Plain functions over a forest; whoever calls holds the tree's lock.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from delta_tree.forest import Forest
from delta_tree.node import Node, NodeId, SegmentId
from delta_tree.spans import Span, merge
from delta_tree.totals import TreeStats


@dataclass(frozen=True, slots=True)
class Insertion:
    """The node of the inserted prompt, and the segments whose KV nobody needs."""

    node: Node
    created: bool  # False: the prompt was known, its node was touched and perhaps improved
    freed_segments: tuple[SegmentId, ...]  # the draft's own ones included, if not needed
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """What left the tree."""

    num_nodes: int
    freed_segments: tuple[SegmentId, ...]
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """How much of one node's KV another node refers to as well."""

    node_id: NodeId
    num_tokens: int


def measure(forest: Forest, nodes: Iterable[Node]) -> TreeStats:
    """Figures over `nodes`, which must be whole namespaces."""
    nodes = list(nodes)
    used = {segment_id for node in nodes for segment_id in node.pieces.segment_ids}
    segments = [forest.segments[segment_id] for segment_id in used]
    return TreeStats(
        num_nodes=len(nodes),
        num_roots=sum(node.parent is None for node in nodes),
        num_pinned=sum(node.pinned for node in nodes),
        num_segments=len(segments),
        num_tokens=sum(node.num_tokens for node in nodes),
        num_stored_tokens=sum(segment.num_tokens for segment in segments),
        num_bytes=sum(segment.num_bytes for segment in segments),
        max_depth=_max_depth(forest, nodes),
    )


def owned_bytes(forest: Forest, node: Node) -> int:
    """KV bytes that only this node refers to: what its eviction would free."""
    return sum(
        forest.segments[segment_id].num_bytes
        for segment_id in node.pieces.segment_ids
        if forest.num_references(segment_id) == 1
    )


def subtree_bytes(forest: Forest, node_id: NodeId) -> int:
    """KV bytes that only this node and its descendants refer to."""
    inside: Counter[SegmentId] = Counter()
    for member in forest.subtree(node_id):
        inside.update(forest.nodes[member].pieces.segment_ids)
    return sum(
        forest.segments[segment_id].num_bytes
        for segment_id, count in inside.items()
        if forest.num_references(segment_id) == count
    )


def shared_with(forest: Forest, node: Node) -> tuple[Sharing, ...]:
    """The nodes that refer to the same KV, and how many of `node`'s tokens; most first."""
    mine = _stored_spans(node)
    found: list[Sharing] = []
    for other in forest.nodes.values():
        if other.node_id == node.node_id or mine.keys().isdisjoint(other.pieces.segment_ids):
            continue
        theirs = _stored_spans(other)
        num_tokens = sum(
            len(span.intersection(merged))
            for segment_id, spans in mine.items()
            for merged in merge(theirs.get(segment_id, ()))
            for span in spans
        )
        if num_tokens:
            found.append(Sharing(other.node_id, num_tokens))
    return tuple(sorted(found, key=lambda sharing: (-sharing.num_tokens, sharing.node_id)))


def _stored_spans(node: Node) -> dict[SegmentId, list[Span]]:
    """Per segment, which of its tokens the node refers to."""
    spans: defaultdict[SegmentId, list[Span]] = defaultdict(list)
    for piece in node.pieces:
        spans[piece.segment_id].append(Span(piece.offset, piece.end))
    return spans


def _max_depth(forest: Forest, nodes: Iterable[Node]) -> int:
    depths: dict[NodeId, int] = {}
    for node in nodes:
        path: list[NodeId] = []
        at: NodeId | None = node.node_id
        while at is not None and at not in depths:
            path.append(at)
            at = forest.nodes[at].parent
        above = 0 if at is None else depths[at]
        for steps, node_id in enumerate(reversed(path), start=1):
            depths[node_id] = above + steps
    return max(depths.values(), default=0)
