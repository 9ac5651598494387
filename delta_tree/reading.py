"""
Asking the tree: everything that changes nothing.

Looking up one node or segment takes no lock, a dictionary look-up is atomic; a question over many
nodes takes the tree's lock for as long as it counts.
"""

import threading
from collections.abc import Container, Sequence

from delta_tree import spans
from delta_tree.answers import (
    Sharing,
    measure,
    owned_bytes,
    shared_with,
    subtree_bytes,
)
from delta_tree.forest import Forest
from delta_tree.node import Node, NodeId, Segment, SegmentId
from delta_tree.spans import TokenIds
from delta_tree.totals import TreeStats


class TreeReader:
    """The half of a DeltaTree that only looks."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._lock = threading.RLock()

    def get(self, node_id: NodeId) -> Node | None:
        """The node with this id, or None."""
        return self._forest.nodes.get(node_id)

    def node(self, node_id: NodeId) -> Node:
        """
        The node with this id.

        Raises:  UnknownNodeError
        """
        return self._forest.node(node_id)

    def segment(self, segment_id: SegmentId) -> Segment:
        """
        The segment with this id.

        Raises:  UnknownSegmentError
        """
        return self._forest.segment(segment_id)

    def find(self, namespace: str, token_ids: Sequence[int] | TokenIds) -> Node | None:
        """The node of exactly this prompt in this namespace, or None."""
        return self._forest.find(namespace, spans.token_ids(token_ids))

    def reference_count(self, segment_id: SegmentId) -> int:
        """How many nodes refer to a segment; 0 if there is no such segment."""
        return self._forest.num_references(segment_id)

    def nodes(self, namespace: str | None = None) -> tuple[Node, ...]:
        """All nodes, or those of one namespace, in order of insertion."""
        with self._lock:
            return tuple(
                node
                for node in self._forest.nodes.values()
                if namespace is None or node.namespace == namespace
            )

    def segments(self, namespace: str | None = None) -> tuple[Segment, ...]:
        """All segments that nodes refer to, or those of one namespace."""
        with self._lock:
            return tuple(
                segment
                for segment in self._forest.segments.values()
                if namespace is None or segment.namespace == namespace
            )

    def children(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """
        The nodes whose script starts from this one.

        Raises:  UnknownNodeError
        """
        with self._lock:
            self.node(node_id)
            return self._forest.children(node_id)

    def eviction_candidates(self, namespace: str | None = None) -> tuple[Node, ...]:
        """The nodes that are not pinned, least recently used first."""
        with self._lock:
            return tuple(self._forest.nodes[node_id] for node_id in self._forest.use_order.ids(namespace))

    def least_recently_used(
        self, namespace: str | None = None, *, without: Container[NodeId] = ()
    ) -> Node | None:
        """The node to evict first: not pinned, and none of `without`; None if there is none."""
        with self._lock:
            ids = self._forest.use_order.ids(namespace)
            node_id = next((node_id for node_id in ids if node_id not in without), None)
            return None if node_id is None else self._forest.nodes[node_id]

    def pinned(self) -> frozenset[NodeId]:
        """The nodes that eviction passes over."""
        with self._lock:
            return self._forest.totals.pinned

    def stats(self, namespace: str | None = None) -> TreeStats:
        """Figures over all nodes, at hand without a lock, or over those of one namespace, counted now."""
        if namespace is None:
            return self._forest.totals.stats()
        with self._lock:
            return measure(self._forest, self.nodes(namespace))

    def owned_bytes(self, node_id: NodeId) -> int:
        """
        KV bytes that only this node refers to: what its eviction would free.

        Raises:  UnknownNodeError
        """
        with self._lock:
            return owned_bytes(self._forest, self.node(node_id))

    def subtree_bytes(self, node_id: NodeId) -> int:
        """
        KV bytes that only this node and its descendants refer to.

        Raises:  UnknownNodeError
        """
        with self._lock:
            self.node(node_id)
            return subtree_bytes(self._forest, node_id)

    def shared_with(self, node_id: NodeId) -> tuple[Sharing, ...]:
        """
        The nodes that refer to the same KV as this one, and for how many of its tokens.

        Raises:  UnknownNodeError
        """
        with self._lock:
            return shared_with(self._forest, self.node(node_id))
