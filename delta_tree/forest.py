"""
All nodes and segments in memory, with indexes by prompt, parent, reference and order of eviction.

tree.py computes each change as a value, writes it to disk, and then applies it here, so that memory and disk
never differ. tree.py also holds the lock.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace
from operator import attrgetter

import numpy as np

from delta_tree.change import Change
from delta_tree.errors import InvalidNodeError
from delta_tree.eviction_order import EvictionOrder
from delta_tree.lineage import Lineage
from delta_tree.node import Node, NodeId, Segment, SegmentId
from delta_tree.spans import TokenIds
from delta_tree.totals import Totals


def prompt_key(namespace: str, tokens: TokenIds) -> bytes:
    """
    A 16-byte hash of a namespace and a prompt.

    The namespace is preceded by its length, so that no namespace and prompt together read like another pair.
    """
    name = namespace.encode()
    digest = hashlib.blake2b(digest_size=16, person=b"kvshare-prompt")
    digest.update(len(name).to_bytes(8, "little") + name + tokens.astype("<i4", copy=False).data)
    return digest.digest()


class Forest:
    """The trees of prompts of all namespaces, and the segments they refer to."""

    def __init__(self) -> None:
        self.nodes: dict[NodeId, Node] = {}
        self.segments: dict[SegmentId, Segment] = {}
        # How many nodes refer to a segment, where more than one does. Most segments have one, and their
        # dictionary entries would take more memory than the segments themselves.
        self._references: dict[SegmentId, int] = {}
        self._by_prompt: dict[bytes, NodeId] = {}
        self._totals: defaultdict[str | None, Totals] = defaultdict(Totals)  # of all: under None
        self.lineage = Lineage()
        self.eviction_order = EvictionOrder()

    def num_references(self, segment_id: SegmentId) -> int:
        """How many nodes refer to a segment; 0 if there is no such segment."""
        return self._references.get(segment_id, 1) if segment_id in self.segments else 0

    def find(self, namespace: str, tokens: TokenIds) -> Node | None:
        """The node of exactly this prompt, or None. It is looked up by hash, and its tokens are compared."""
        node_id = self._by_prompt.get(prompt_key(namespace, tokens))
        node = None if node_id is None else self.nodes.get(node_id)
        if node is None or node.namespace != namespace:
            return None
        return node if np.array_equal(node.token_ids, tokens) else None

    def totals(self, namespace: str | None = None) -> Totals:
        """Of all nodes, or those of one namespace."""
        return self._totals.get(namespace) or Totals()

    def freed_by(self, put: Iterable[Node], dropped: Iterable[NodeId]) -> tuple[tuple[SegmentId, ...], int]:
        """The segments that no node refers to after this change, and the sum of their bytes."""
        lost: Counter[SegmentId] = Counter()
        for node in put:
            if node.node_id in self.nodes:
                lost.update(self.nodes[node.node_id].pieces.segment_ids)
            lost.subtract(node.pieces.segment_ids)
        for node_id in dropped:
            lost.update(self.nodes[node_id].pieces.segment_ids)
        freed = tuple(
            segment_id
            for segment_id, count in lost.items()
            if count > 0 and self.num_references(segment_id) == count
        )
        return freed, sum(self.segments[segment_id].num_bytes for segment_id in freed)

    def apply(self, change: Change) -> None:
        """Apply a change that is on disk."""
        unclaimed = {segment.segment_id for segment in change.put_segments}
        for segment in change.put_segments:
            self.segments[segment.segment_id] = segment
            for totals in self._totals_with(segment.namespace):
                totals.add_segment(segment)
        for node in change.put_nodes:
            self._put(node, change.parents.get(node.node_id), unclaimed)
        # The newest first: in a purge, children go before their parents, so that none has to be moved.
        for node_id in reversed(change.dropped_nodes):
            self._drop(node_id)
        for segment_id in change.dropped_segments:
            segment = self.segments.pop(segment_id)
            for totals in self._totals_with(segment.namespace):
                totals.add_segment(segment, -1)
            if not self._totals[segment.namespace]:
                del self._totals[segment.namespace]

    def restore(self, stored: Change) -> None:
        """
        Apply what was loaded to an empty forest.

        Raises:  InvalidNodeError if some nodes descend from no root
        """
        waiting: defaultdict[NodeId | None, list[Node]] = defaultdict(list)
        for node in stored.put_nodes:
            waiting[stored.parents.get(node.node_id)].append(node)
        rooted = waiting.pop(None, [])
        for node in rooted:
            rooted += waiting.pop(node.node_id, ())
        if waiting:
            raise InvalidNodeError(f"{len(stored.put_nodes) - len(rooted)} nodes descend from no root")
        self.apply(replace(stored, put_nodes=tuple(rooted)))
        self.nodes = {node.node_id: node for node in stored.put_nodes}  # in order of insertion again
        for node in sorted(stored.put_nodes, key=attrgetter("last_used_at")):
            self.eviction_order.put(node)

    def _put(self, node: Node, parent: NodeId | None, unclaimed: set[SegmentId]) -> None:
        old = self.nodes.get(node.node_id)
        self.nodes[node.node_id] = node
        if old is None:
            self._by_prompt[prompt_key(node.namespace, node.token_ids)] = node.node_id
            grown = self.lineage.add(node.node_id, parent)
            for totals in self._totals_with(node.namespace):
                totals.add_node(node, grown)
        if old is None or old.pieces != node.pieces:
            self._refer(node, unclaimed)
            if old is not None:
                self._release(old)
        if old is not None and old.num_tokens != node.num_tokens:
            self._resize(old, node)
        else:
            self.eviction_order.put(node)  # any other change of a node is a use or a pin
        for totals in self._totals_with(node.namespace):
            totals.note_pin(node)

    def _resize(self, old: Node, node: Node) -> None:
        """A node became longer or shorter. That is no use, so its rank in the order of eviction stays."""
        if node.num_tokens < old.num_tokens:
            self.eviction_order.shorten(node.node_id, node.num_tokens / old.num_tokens)
        del self._by_prompt[prompt_key(old.namespace, old.token_ids)]
        self._by_prompt[prompt_key(node.namespace, node.token_ids)] = node.node_id
        for totals in self._totals_with(node.namespace):
            totals.add_tokens(node.num_tokens - old.num_tokens)

    def _drop(self, node_id: NodeId) -> None:
        node = self.nodes.pop(node_id)
        del self._by_prompt[prompt_key(node.namespace, node.token_ids)]
        self._release(node)
        grown = self.lineage.remove(node_id)
        for totals in self._totals_with(node.namespace):
            totals.add_node(node, grown, -1)
        self.eviction_order.remove(node)

    def _totals_with(self, namespace: str) -> tuple[Totals, Totals]:
        return self._totals[None], self._totals[namespace]

    def _refer(self, node: Node, unclaimed: set[SegmentId]) -> None:
        for segment_id in node.pieces.segment_ids:
            if segment_id in unclaimed:
                unclaimed.discard(segment_id)  # the first reference needs no entry
            else:
                self._references[segment_id] = self._references.get(segment_id, 1) + 1

    def _release(self, node: Node) -> None:
        for segment_id in node.pieces.segment_ids:
            count = self._references.pop(segment_id, 1) - 1
            if count > 1:
                self._references[segment_id] = count
