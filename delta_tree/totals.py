"""Figures over all nodes, kept up to date with each change, so that asking for them costs nothing."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from delta_tree.node import Node, NodeId, Segment


@dataclass(frozen=True, slots=True)
class TreeStats:
    """Figures over all nodes, or those of one namespace."""

    num_nodes: int
    num_roots: int
    num_pinned: int
    num_segments: int
    num_tokens: int  # of all prompts together
    num_stored_tokens: int  # of all segments: what the prompts cost once they share
    num_bytes: int  # KV bytes of all segments
    max_depth: int  # nodes on the longest way from a root; 0 without nodes


class Totals:
    """Sums over a forest. A node that moves under another parent takes its descendants' depths along."""

    def __init__(self, children_of: Callable[[NodeId], Iterable[NodeId]]) -> None:
        self._children_of = children_of
        self._depths: dict[NodeId, int] = {}
        self._num_at: Counter[int] = Counter()  # nodes by depth
        self._pinned: set[NodeId] = set()
        self._num_roots = 0
        self._num_tokens = 0
        self._num_segments = 0
        self._num_stored_tokens = 0
        self._num_bytes = 0

    @property
    def pinned(self) -> frozenset[NodeId]:
        return frozenset(self._pinned)

    def stats(self) -> TreeStats:
        return TreeStats(
            num_nodes=len(self._depths),
            num_roots=self._num_roots,
            num_pinned=len(self._pinned),
            num_segments=self._num_segments,
            num_tokens=self._num_tokens,
            num_stored_tokens=self._num_stored_tokens,
            num_bytes=self._num_bytes,
            max_depth=max(self._num_at, default=0),  # of ints in one C call: no thread comes in between
        )

    def put_segment(self, segment: Segment) -> None:
        self._num_segments += 1
        self._num_stored_tokens += segment.num_tokens
        self._num_bytes += segment.num_bytes

    def drop_segment(self, segment: Segment) -> None:
        self._num_segments -= 1
        self._num_stored_tokens -= segment.num_tokens
        self._num_bytes -= segment.num_bytes

    def put_node(self, node: Node, old: Node | None) -> None:
        """A new node, or another version of one. A parent that comes after its child moves it down."""
        if old is None:
            self._num_tokens += node.num_tokens
        if old is None or old.parent != node.parent:
            self._num_roots += (node.parent is None) - (old is not None and old.parent is None)
            self._set_depths(node)
        (self._pinned.add if node.pinned else self._pinned.discard)(node.node_id)

    def drop_node(self, node: Node) -> None:
        self._num_tokens -= node.num_tokens
        self._num_roots -= node.parent is None
        self._pinned.discard(node.node_id)
        self._move(node.node_id, None)

    def _set_depths(self, node: Node) -> None:
        """Of a node and, where it moved, of all below it."""
        above = 0 if node.parent is None else self._depths.get(node.parent, 0)
        waiting = [(node.node_id, above + 1)]
        while waiting:
            node_id, depth = waiting.pop()
            if self._depths.get(node_id) == depth:
                continue
            self._move(node_id, depth)
            waiting.extend((child, depth + 1) for child in self._children_of(node_id))

    def _move(self, node_id: NodeId, depth: int | None) -> None:
        """To another depth; None: out."""
        if (old := self._depths.pop(node_id, None)) is not None:
            self._num_at[old] -= 1
            if not self._num_at[old]:
                del self._num_at[old]
        if depth is not None:
            self._depths[node_id] = depth
            self._num_at[depth] += 1
