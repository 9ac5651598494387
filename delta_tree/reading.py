"""
The queries of a delta tree: the methods that change nothing.

A look-up of one node or segment takes no lock, because a dictionary look-up is atomic. A query over many
nodes holds the tree's lock.
"""

import threading
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from delta_tree.errors import UnknownNodeError, UnknownSegmentError
from delta_tree.forest import Forest, TreeStats
from delta_tree.node import Eviction, Node, NodeId, Segment, SegmentId
from delta_tree.spans import Span, TokenIds, merge, token_ids

_Stored = TypeVar("_Stored", Node, Segment)


@dataclass(frozen=True, slots=True)
class SharedKV:
    """The part of one node's KV that another node refers to as well."""

    node_id: NodeId
    num_tokens: int


class TreeReader:
    """
    The read-only half of a DeltaTree.

    Raises:  UnknownNodeError, UnknownSegmentError for an unknown id, unless a method says otherwise
    """

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._lock = threading.RLock()

    def get(self, node_id: NodeId) -> Node | None:
        """Return the node with this id, or None."""
        return self._forest.nodes.get(node_id)

    def node(self, node_id: NodeId) -> Node:
        try:
            return self._forest.nodes[node_id]
        except KeyError:
            raise UnknownNodeError(node_id) from None

    def segment(self, segment_id: SegmentId) -> Segment:
        try:
            return self._forest.segments[segment_id]
        except KeyError:
            raise UnknownSegmentError(segment_id) from None

    def find(self, namespace: str, tokens: Sequence[int] | TokenIds) -> Node | None:
        """Return the node of exactly this prompt in this namespace, or None."""
        return self._forest.find(namespace, token_ids(tokens))

    def reference_count(self, segment_id: SegmentId) -> int:
        """Return how many nodes refer to a segment; 0 if there is no such segment."""
        return self._forest.num_references(segment_id)

    def nodes(self, namespace: str | None = None) -> tuple[Node, ...]:
        """Return all nodes, or those of one namespace, in order of insertion."""
        with self._lock:
            return _in_namespace(self._forest.nodes.values(), namespace)

    def namespaces(self) -> frozenset[str]:
        """Return the namespaces that have nodes."""
        with self._lock:
            return frozenset(node.namespace for node in self._forest.nodes.values())

    def segments(self, namespace: str | None = None) -> tuple[Segment, ...]:
        """Return all segments that nodes refer to, or those of one namespace."""
        with self._lock:
            return _in_namespace(self._forest.segments.values(), namespace)

    def ancestors(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """Return parent, grandparent and so on, without evicted ones; empty for a root or an unknown id."""
        with self._lock:
            return self._forest.lineage.ancestors(node_id)

    def roots(self, namespace: str | None = None) -> tuple[Node, ...]:
        """Return the nodes without a parent, or those of one namespace, in order of insertion."""
        with self._lock:
            is_root = self._forest.lineage.is_root
            found = (node for node in self._forest.nodes.values() if is_root(node.node_id))
            return _in_namespace(found, namespace)

    def children(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """Return the nodes whose nearest ancestor is this one."""
        with self._lock:
            self.node(node_id)
            return self._forest.lineage.children(node_id)

    def next_to_evict(
        self, scopes: Collection[str] | None = None, *, without: Container[NodeId] = ()
    ) -> Node | None:
        """
        Return the node to evict first, if any is neither pinned nor in `without`.

        `scopes`: the groups or namespaces whose nodes are compared; None: all nodes.
        """
        with self._lock:
            node_id = self._forest.eviction_order.first(scopes, without)
            return None if node_id is None else self._forest.nodes[node_id]

    def pinned(self) -> frozenset[NodeId]:
        with self._lock:
            return frozenset(self._forest.totals().pinned)

    def stats(self, namespace: str | None = None) -> TreeStats:
        """Return figures over all nodes, or those of one namespace; needs no lock and no counting."""
        return self._forest.totals(namespace).stats()

    def bytes_of(self, group: str) -> int:
        """Return the KV bytes of all namespaces of a group; needs no lock and no counting."""
        return self._forest.bytes_of_groups()[group]

    def bytes_of_groups(self) -> dict[str, int]:
        """Return the bytes of each group with KV. Needs no lock: one C call copies them."""
        return dict(self._forest.bytes_of_groups())

    def owned_bytes(self, node_id: NodeId) -> int:
        """Return the KV bytes that only this node refers to: what its eviction would free."""
        with self._lock:
            self.node(node_id)
            return self._forest.freed_by((), [node_id])[1]

    def freed_by(self, node_ids: Collection[NodeId]) -> Eviction:
        """Return what the eviction of these nodes would remove. Unknown ones are ignored."""
        with self._lock:
            known = [node_id for node_id in node_ids if node_id in self._forest.nodes]
            return Eviction(len(known), *self._forest.freed_by((), known))

    def subtree_bytes(self, node_id: NodeId) -> int:
        """Return the KV bytes that only this node and its descendants refer to."""
        with self._lock:
            self.node(node_id)
            return self._forest.freed_by((), self._forest.lineage.subtree(node_id))[1]

    def bytes_of_subtrees(self, node_ids: Iterable[NodeId]) -> dict[NodeId, int]:
        """Return `subtree_bytes` of each known node; faster than one call per node."""
        with self._lock:
            known = [node_id for node_id in node_ids if node_id in self._forest.nodes]
            subtree = self._forest.lineage.subtree
            return {node_id: self._forest.bytes_only_of(subtree(node_id)) for node_id in known}

    def shared_with(self, node_id: NodeId, *, limit: int | None = None) -> tuple[SharedKV, ...]:
        """
        Return the nodes that refer to the same KV as this one, and to how many of its tokens, most first.

        Nodes are searched without holding the lock, until all references are found, or `limit` nodes: those
        are not always the ones that share most. `num_sharing` says how many there are at least.
        """
        with self._lock:
            node = self.node(node_id)
            mine, others = _stored_spans(node), _in_namespace(self._forest.nodes.values(), node.namespace)
            left = sum(self._forest.num_references(each) - 1 for each in mine)
        sharers: list[SharedKV] = []
        for other in others:
            if left <= 0 or len(sharers) == limit:
                break
            same = mine.keys() & other.pieces.segment_ids if other.node_id != node_id else ()
            if not same:
                continue
            left -= len(same)
            theirs = _stored_spans(other)
            num_tokens = sum(
                len(span.intersection(merged))
                for segment_id in same
                for merged in merge(theirs[segment_id])
                for span in mine[segment_id]
            )
            if num_tokens:
                sharers.append(SharedKV(other.node_id, num_tokens))
        return tuple(sorted(sharers, key=lambda shared: (-shared.num_tokens, shared.node_id)))

    def num_sharing(self, node_id: NodeId) -> int:
        """Return how many other nodes refer to the most shared segment of this node."""
        with self._lock:
            return (
                max(self._forest.num_references(each) for each in self.node(node_id).pieces.segment_ids) - 1
            )


def _in_namespace(values: Iterable[_Stored], namespace: str | None) -> tuple[_Stored, ...]:
    return tuple(value for value in values if namespace is None or value.namespace == namespace)


def _stored_spans(node: Node) -> dict[SegmentId, list[Span]]:
    """Return for each segment the spans of its tokens to which the node refers."""
    spans: defaultdict[SegmentId, list[Span]] = defaultdict(list)
    for piece in node.pieces:
        spans[piece.segment_id].append(Span(piece.offset, piece.end))
    return spans
