"""
The values of which the tree consists: segments, nodes, and drafts of nodes.

Their only methods derive values from their fields; tree.py keeps them consistent with each other.
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
"""The usual length of a segment. KV is cut into segments so that a prompt can be evicted from its end."""

_MIN_SEGMENT_TOKENS: Final = 16
_SEGMENTS_IN_STORE: Final = 512

UNKNOWN_DEVIATION: Final = 1e6
"""The deviation of a prompt for which it was not estimated; nothing approximate is copied from it."""


_YEAR_2026 = 1_767_225_600.0  # Unix time
_RANDOM_BITS = 12


@dataclass(frozen=True, slots=True)
class Segment:
    """Describes one immutable stretch of KV; a tier holds its bytes."""

    segment_id: SegmentId
    namespace: str
    first_position: int  # of its first token, in the prompt it was computed for
    num_tokens: int
    generation: int  # 0: all KV that it attended to was exact
    num_bytes: int
    checksum: int  # of the KV bytes, 0 <= checksum < 2**64

    @property
    def bytes_per_token(self) -> float:
        """KV bytes of one token, all layers."""
        return self.num_bytes / self.num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One stored prompt. `token_ids` is read-only, so that all users of the node can share it."""

    node_id: NodeId
    namespace: str
    token_ids: TokenIds  # (T,) int32
    pieces: PieceTable
    exact_length: int  # leading tokens whose KV is exact
    deviation: float  # expected KL of an answer, in nats; 0 where all KV is exact
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
    The length of segments for a memory that holds this many tokens of KV.

    Memory is freed segment by segment. In a small memory a segment of `SEGMENT_TOKENS` would be a large part
    of it; in a large memory shorter segments would only be more numerous (docs/log.md has figures).
    """
    return max(_MIN_SEGMENT_TOKENS, min(SEGMENT_TOKENS, capacity_tokens // _SEGMENTS_IN_STORE))


def new_segment_id() -> SegmentId:
    """A random id. There are 2**63, so that no store ever draws one twice."""
    return SegmentId(secrets.randbelow(2**63 - 1) + 1)


class NodeIds:
    """
    Makes node ids that ascend with time: the later of two prompts has the higher id.

    An id is 41 bits of milliseconds since 2026 and 12 random bits. So an index that is older than the store
    cannot refer to a new prompt by an old id. Not thread-safe; the tree's lock guards it.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last = 0

    def __call__(self) -> NodeId:
        milliseconds = max(1, int(1000 * (self._clock() - _YEAR_2026)))
        self._last = max(self._last + 1, milliseconds << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS))
        return NodeId(self._last)
