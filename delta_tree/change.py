"""Values that describe one change of the tree, and what an insertion or an eviction returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from delta_tree.node import Node, NodeId, Segment, SegmentId


@dataclass(frozen=True, slots=True)
class Change:
    """One atomic change. A node in `put_nodes` replaces the stored node with its id."""

    put_segments: tuple[Segment, ...] = ()
    put_nodes: tuple[Node, ...] = ()
    parents: Mapping[NodeId, NodeId] = field(default_factory=dict)  # of the new nodes that are no roots
    dropped_nodes: tuple[NodeId, ...] = ()
    heirs: Mapping[NodeId, NodeId] = field(default_factory=dict)  # dropped: new parent of its children
    dropped_segments: tuple[SegmentId, ...] = ()


@dataclass(frozen=True, slots=True)
class Insertion:
    """The node of the inserted prompt, and the segments that no node refers to."""

    node: Node
    created: bool  # False: the prompt was stored already; its use was counted, its pieces may be better
    freed_segments: tuple[SegmentId, ...]  # may include new segments of the draft


@dataclass(frozen=True, slots=True)
class Eviction:
    """What left the tree."""

    num_nodes: int
    freed_segments: tuple[SegmentId, ...]
    freed_bytes: int
