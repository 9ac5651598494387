"""What an operation on the tree does, and what it answers: values that the tree stores, makes and returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from delta_tree.node import Node, NodeId, Segment, SegmentId


@dataclass(frozen=True, slots=True)
class Change:
    """What one operation does: all of it or nothing. A put node replaces one with its id."""

    put_segments: tuple[Segment, ...] = ()
    put_nodes: tuple[Node, ...] = ()
    parents: Mapping[NodeId, NodeId] = field(default_factory=dict)  # of those new nodes that are no roots
    dropped_nodes: tuple[NodeId, ...] = ()
    heirs: Mapping[NodeId, NodeId] = field(default_factory=dict)  # of dropped nodes: get their children
    dropped_segments: tuple[SegmentId, ...] = ()


@dataclass(frozen=True, slots=True)
class Insertion:
    """The node of the inserted prompt, and the segments whose KV nobody needs."""

    node: Node
    created: bool  # False: the prompt was known, its node was touched and perhaps improved
    freed_segments: tuple[SegmentId, ...]  # the draft's own ones included, if not needed


@dataclass(frozen=True, slots=True)
class Eviction:
    """What left the tree."""

    num_nodes: int
    freed_segments: tuple[SegmentId, ...]
    freed_bytes: int
