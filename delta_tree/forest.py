"""
All nodes and segments in memory, with the indexes that answer questions about them.

A change is a value: first it is worked out, then stored, then applied here, so that what is in
memory and what is on disk never differ. The forest neither locks nor stores; tree.py does.
"""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from delta_tree.errors import UnknownNodeError, UnknownSegmentError
from delta_tree.node import Node, NodeId, Segment, SegmentId
from delta_tree.spans import TokenIds
from delta_tree.totals import Totals
from delta_tree.use_order import UseOrder


@dataclass(frozen=True, slots=True)
class Change:
    """What one operation does: all of it or nothing. A put node replaces one with its id."""

    put_segments: tuple[Segment, ...] = ()
    put_nodes: tuple[Node, ...] = ()
    dropped_nodes: tuple[NodeId, ...] = ()
    dropped_segments: tuple[SegmentId, ...] = ()


def prompt_key(namespace: str, tokens: TokenIds) -> bytes:
    """
    16 bytes that name a prompt within a namespace.

    The name is length-framed, so that no namespace can be spelled into another's tokens.
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
        # Nodes that refer to a segment, where it is more than one: most have one, and thousands
        # of dictionary entries saying so would cost more than the segments' own fields.
        self._references: dict[SegmentId, int] = {}
        # Dictionaries as ordered sets: a template may have a hundred thousand children.
        self._children: dict[NodeId, dict[NodeId, None]] = {}
        self._by_prompt: dict[bytes, NodeId] = {}
        self.totals = Totals(lambda node_id: self._children.get(node_id, ()))
        self.use_order = UseOrder()

    def node(self, node_id: NodeId) -> Node:
        """
        The node with this id.

        Raises:  UnknownNodeError
        """
        try:
            return self.nodes[node_id]
        except KeyError:
            raise UnknownNodeError(node_id) from None

    def segment(self, segment_id: SegmentId) -> Segment:
        """
        The segment with this id.

        Raises:  UnknownSegmentError
        """
        try:
            return self.segments[segment_id]
        except KeyError:
            raise UnknownSegmentError(segment_id) from None

    def num_references(self, segment_id: SegmentId) -> int:
        """How many nodes refer to a segment; 0 if there is no such segment."""
        return self._references.get(segment_id, 1) if segment_id in self.segments else 0

    def find(self, namespace: str, tokens: TokenIds) -> Node | None:
        """The node of exactly this prompt. The hash proposes, the tokens decide."""
        node_id = self._by_prompt.get(prompt_key(namespace, tokens))
        node = None if node_id is None else self.nodes.get(node_id)
        if node is None or node.namespace != namespace:
            return None
        return node if np.array_equal(node.token_ids, tokens) else None

    def children(self, node_id: NodeId) -> tuple[NodeId, ...]:
        """The nodes whose script starts from this one."""
        return tuple(self._children.get(node_id, ()))

    def subtree(self, node_id: NodeId) -> list[NodeId]:
        """A node and all its descendants."""
        found = [node_id]
        for seen in found:
            found.extend(self.children(seen))
        return found

    def freed_by(self, put: Iterable[Node], dropped: Iterable[NodeId]) -> tuple[tuple[SegmentId, ...], int]:
        """Segments nobody refers to once the change is made, and their bytes together."""
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
        """Make a change that has been worked out and stored."""
        unclaimed = {segment.segment_id for segment in change.put_segments}
        for segment in change.put_segments:
            self.segments[segment.segment_id] = segment
            self.totals.put_segment(segment)
        for node in change.put_nodes:
            old = self.nodes.get(node.node_id)
            self.nodes[node.node_id] = node
            if old is None:
                self._by_prompt[prompt_key(node.namespace, node.token_ids)] = node.node_id
            if old is None or old.pieces != node.pieces:
                self._refer(node, unclaimed)
                if old is not None:
                    self._release(old)
            if old is None or old.parent != node.parent:
                self._detach(old)
                self._attach(node)
            self.totals.put_node(node, old)
            if old is None or _use_of(old) != _use_of(node):
                self.use_order.put(node)
        for node_id in change.dropped_nodes:
            node = self.nodes.pop(node_id)
            del self._by_prompt[prompt_key(node.namespace, node.token_ids)]
            self._release(node)
            self._detach(node)
            self.totals.drop_node(node)
            self.use_order.remove(node)
        for segment_id in change.dropped_segments:
            self.totals.drop_segment(self.segments.pop(segment_id))

    def restore(self, segments: Sequence[Segment], nodes: Sequence[Node]) -> None:
        """Take what was stored into an empty forest."""
        self.apply(Change(put_segments=tuple(segments), put_nodes=tuple(nodes)))
        self.use_order.restore(nodes)

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

    def _attach(self, node: Node) -> None:
        if node.parent is not None:
            self._children.setdefault(node.parent, {})[node.node_id] = None

    def _detach(self, node: Node | None) -> None:
        if node is None or node.parent is None:
            return
        siblings = self._children.get(node.parent)
        if siblings is None:
            return
        siblings.pop(node.node_id, None)
        if not siblings:
            del self._children[node.parent]


def _use_of(node: Node) -> tuple[float, int, bool]:
    return node.last_used_at, node.num_hits, node.pinned


def recompose(forest: Forest, dropped: Collection[NodeId]) -> tuple[Node, ...]:
    """
    The children that lose their parent to `dropped`, moved to the nearest ancestor that stays.

    Their scripts are recomposed along the way; under no ancestor they become roots.
    """
    moved: list[Node] = []
    for gone in dropped:
        for child_id in forest.children(gone):
            if child_id in dropped:
                continue
            child = forest.nodes[child_id]
            script, parent_id = child.script, child.parent
            while parent_id is not None and parent_id in dropped:
                parent = forest.nodes[parent_id]
                if script is not None and parent.script is not None:
                    script = parent.script.compose(script)
                parent_id = parent.parent
            if parent_id is None:
                script = None
            moved.append(replace(child, parent=parent_id, script=script))
    return tuple(moved)
