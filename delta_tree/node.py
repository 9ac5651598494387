"""
The values the tree is made of: segments, nodes, and the draft of a node.

They carry no behaviour beyond what follows from their fields; the tree keeps them consistent.
"""

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NewType

from delta_tree.pieces import PieceTable, SegmentId
from delta_tree.spans import TokenIds

__all__ = [
    "SEGMENT_TOKENS",
    "UNKNOWN_DEVIATION",
    "Node",
    "NodeDraft",
    "NodeId",
    "NodeIds",
    "Segment",
    "SegmentId",
    "new_segment_id",
    "segment_tokens",
]

NodeId = NewType("NodeId", int)
"""A positive integer below 2**53 (exact in JSON), higher for later prompts, stable across reopening."""

SEGMENT_TOKENS: Final = 256
"""KV is cut into segments of so many tokens at most (see `split`): a prompt is evicted from its end."""

_MIN_SEGMENT_TOKENS: Final = 16
_SEGMENTS_IN_STORE: Final = 512

UNKNOWN_DEVIATION: Final = 1e6
"""Of a prompt of which nobody knows how far its answer may be off: nothing approximate is copied from it."""


_YEAR_2026 = 1_767_225_600.0  # Unix time
_RANDOM_BITS = 12


@dataclass(frozen=True, slots=True)
class Segment:
    """What the tree knows of one immutable stretch of KV. Its bytes live elsewhere."""

    segment_id: SegmentId
    namespace: str
    first_position: int  # of its first token, in the prompt it was computed for
    num_tokens: int
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
    pieces: PieceTable
    exact_length: int  # leading tokens whose KV is exact
    deviation: float  # of an answer behind the rest, as its maker expects it; 0 where all is exact
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
    deviation: float = 0.0


def segment_tokens(capacity_tokens: int) -> int:
    """
    Length of the segments in a store of so many tokens.

    What leaves a store leaves by the segment. In one of few tokens a segment of `SEGMENT_TOKENS` would be a
    large part of it; in a large one short segments would only be many (docs/log.md has figures).
    """
    return max(_MIN_SEGMENT_TOKENS, min(SEGMENT_TOKENS, capacity_tokens // _SEGMENTS_IN_STORE))


def new_segment_id() -> SegmentId:
    """A fresh random id. With 2**63 of them, none comes up twice in the life of a store."""
    return SegmentId(secrets.randbelow(2**63 - 1) + 1)


class NodeIds:
    """
    Ids by the time, so that of two prompts the later one has the higher id: whoever ranks by id ranks by age.

    Milliseconds since 2026 in 41 bits, then 12 random bits: an index that outlives the store cannot name a
    later prompt by an id of then. Not thread-safe; the tree's lock guards it.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last = 0

    def __call__(self) -> NodeId:
        milliseconds = max(1, int(1000 * (self._clock() - _YEAR_2026)))
        self._last = max(self._last + 1, milliseconds << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS))
        return NodeId(self._last)
