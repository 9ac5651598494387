"""Sums over many nodes, updated with each change, so that a query does not have to count."""

from collections import Counter
from collections.abc import Mapping
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
    num_stored_tokens: int  # of all segments: less than `num_tokens` where prompts share
    num_bytes: int  # KV bytes of all segments
    max_depth: int  # nodes on the longest path from a root; 0 without nodes


class Totals:
    """Sums over all nodes and segments, or over those of one namespace."""

    def __init__(self) -> None:
        self.pinned: set[NodeId] = set()
        self._num_at: Counter[int] = Counter()  # nodes by depth; a root has depth 1
        self._num_nodes = 0
        self._num_tokens = 0
        self._num_segments = 0
        self._num_stored_tokens = 0
        self._num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._num_nodes or self._num_segments)

    def stats(self) -> TreeStats:
        return TreeStats(
            num_nodes=self._num_nodes,
            num_roots=self._num_at.get(1, 0),
            num_pinned=len(self.pinned),
            num_segments=self._num_segments,
            num_tokens=self._num_tokens,
            num_stored_tokens=self._num_stored_tokens,
            num_bytes=self._num_bytes,
            max_depth=max(self._num_at, default=0),  # one C call over ints, so atomic between threads
        )

    def add_segment(self, segment: Segment, sign: int = 1) -> None:
        """Add a segment, or with `sign` -1 subtract it."""
        self._num_segments += sign
        self._num_stored_tokens += sign * segment.num_tokens
        self._num_bytes += sign * segment.num_bytes

    def add_node(self, node: Node, grown: Mapping[int, int], sign: int = 1) -> None:
        """Add a node (`sign` -1: subtract it); `grown` says how many more nodes each depth has now."""
        self._num_nodes += sign
        self._num_tokens += sign * node.num_tokens
        if sign < 0:
            self.pinned.discard(node.node_id)
        for depth, number in grown.items():
            self._num_at[depth] += number
            if not self._num_at[depth]:
                del self._num_at[depth]

    def add_tokens(self, num_tokens: int) -> None:
        """Add the tokens by which a node became longer; negative if it became shorter."""
        self._num_tokens += num_tokens

    def note_pin(self, node: Node) -> None:
        (self.pinned.add if node.pinned else self.pinned.discard)(node.node_id)
