"""
The values the tree is made of: segments, nodes, and the draft of a node.

They carry no behaviour beyond what follows from their fields; the tree keeps them consistent.
"""

import secrets
from dataclasses import dataclass
from typing import NewType

from delta_tree.pieces import PieceTable, SegmentId
from delta_tree.script import EditScript
from delta_tree.spans import TokenIds

__all__ = ["Node", "NodeDraft", "NodeId", "Segment", "SegmentId", "new_node_id", "new_segment_id"]

NodeId = NewType("NodeId", int)
"""A positive integer below 2**53 (exact in JSON), random, stable across reopening."""


@dataclass(frozen=True, slots=True)
class Segment:
    """What the tree knows of one immutable stretch of KV. Its bytes live elsewhere."""

    segment_id: SegmentId
    namespace: str
    first_position: int  # of its first token, in the prompt it was computed for
    num_tokens: int
    prefix_hash: bytes  # of the tokens it was computed after
    generation: int  # 0: everything it attended to was exact
    num_bytes: int
    checksum: int  # of the KV bytes, 0 <= checksum < 2**64

    @property
    def bytes_per_token(self) -> float:
        """KV bytes of one token, all layers."""
        return self.num_bytes / self.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One prompt. `token_ids` is read-only and shared by everybody who holds the node."""

    node_id: NodeId
    namespace: str
    token_ids: TokenIds  # (T,) int32
    parent: NodeId | None
    script: EditScript | None  # from the parent's tokens; None for a root
    pieces: PieceTable
    exact_length: int  # leading tokens whose KV is exact
    created_at: float  # Unix time, seconds
    last_used_at: float
    num_hits: int
    pinned: bool

    @property
    def num_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class NodeDraft:
    """A prompt to be inserted, with the segments that were computed for it."""

    namespace: str
    token_ids: TokenIds
    parent: NodeId | None
    pieces: PieceTable
    new_segments: tuple[Segment, ...]
    exact_length: int


def new_segment_id() -> SegmentId:
    """A fresh random id. With 2**63 of them, none comes up twice in the life of a store."""
    return SegmentId(secrets.randbelow(2**63 - 1) + 1)


def new_node_id() -> NodeId:
    """A fresh random id: an index that outlives the store cannot name a later prompt by it."""
    return NodeId(secrets.randbelow(2**53 - 1) + 1)
