"""
The values of which the tree consists: segments, pieces of them, nodes, drafts of nodes, and changes.

Their methods only derive values from their fields; tree.py keeps them consistent. `NodeIds` makes new ids.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NewType

import numpy as np
import numpy.typing as npt

from delta_tree.errors import EditRangeError
from delta_tree.spans import TokenIds

SegmentId = NewType("SegmentId", int)
"""A positive 63-bit integer, drawn at random so that it is never used twice."""

MAX_INT64 = 2**63 - 1

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
class Piece:
    """`length` tokens of a segment, from its token `offset` on."""

    segment_id: SegmentId
    offset: int
    length: int

    def __post_init__(self) -> None:
        if not 0 < self.segment_id <= MAX_INT64:
            raise EditRangeError(f"segment id {self.segment_id} is not a positive 63-bit integer")
        if self.offset < 0 or self.length <= 0:
            raise EditRangeError(
                f"a piece needs offset >= 0 and length > 0, got {self.offset} and {self.length}"
            )

    @property
    def end(self) -> int:
        """Return the offset in the segment just after the piece."""
        return self.offset + self.length


class PieceTable:
    """
    Pieces in prompt order; together they cover positions `[0, num_tokens)` exactly once.

    Immutable, comparable, hashable. Neighbours that continue each other are merged.
    """

    __slots__ = ("_rows",)
    _rows: bytes  # (P, 3) int64: segment id, offset, length; a tenth of the memory of Piece objects

    def __init__(self, pieces: Iterable[Piece]) -> None:
        rows = [(piece.segment_id, piece.offset, piece.length) for piece in _merged(pieces)]
        self._rows = np.asarray(rows, dtype="<i8").tobytes()

    @classmethod
    def from_bytes(cls, rows: bytes) -> "PieceTable":
        """Return a table from its `to_bytes`. Raises EditRangeError unless its rows are possible pieces."""
        if len(rows) % 24:
            raise EditRangeError(f"{len(rows)} bytes are not a whole number of 24-byte pieces")
        return cls(Piece(*row) for row in np.frombuffer(rows, dtype="<i8").reshape(-1, 3).tolist())

    @classmethod
    def _of_rows(cls, rows: bytes) -> "PieceTable":
        """Return a table of rows that are known to be in order."""
        table = cls(())
        table._rows = rows
        return table

    @property
    def num_tokens(self) -> int:
        return int(self._table()[:, 2].sum())

    @property
    def segment_ids(self) -> frozenset[SegmentId]:
        return frozenset(SegmentId(row) for row in self._table()[:, 0].tolist())

    def first(self, num_tokens: int) -> "PieceTable":
        """Return the pieces of the first `num_tokens` positions."""
        table = self._table()
        ends = np.cumsum(table[:, 2])
        first = table[: int(ends.searchsorted(num_tokens)) + 1].copy()
        if len(first) and num_tokens < ends[len(first) - 1]:
            first[-1, 2] -= ends[len(first) - 1] - num_tokens
        return self._of_rows(first[first[:, 2] > 0].tobytes())

    def to_bytes(self) -> bytes:
        """Return the table's rows (segment id, offset, length) as little-endian int64."""
        return self._rows

    def __iter__(self) -> Iterator[Piece]:
        return (Piece(*row) for row in self._table().tolist())

    def __len__(self) -> int:
        return len(self._rows) // 24

    def rows(self) -> list[tuple[int, SegmentId, int, int]]:
        """Return each piece as (position in the prompt, segment id, offset, length): faster than a loop."""
        table = self._table()
        segment_ids, offsets, lengths = table.T.tolist()
        starts = (np.cumsum(table[:, 2]) - table[:, 2]).tolist()
        return list(zip(starts, segment_ids, offsets, lengths, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PieceTable) and self._rows == other._rows

    def __hash__(self) -> int:
        return hash(self._rows)

    def __repr__(self) -> str:
        return f"PieceTable({self.num_tokens} tokens in {len(self)} pieces)"

    def _table(self) -> npt.NDArray[np.int64]:
        return np.frombuffer(self._rows, dtype="<i8").reshape(-1, 3)


def _merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Return the same pieces, neighbours that continue each other joined into one."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and (piece.segment_id, piece.offset) == (merged[-1].segment_id, merged[-1].end):
            merged[-1] = replace(merged[-1], length=merged[-1].length + piece.length)
        else:
            merged.append(piece)
    return merged


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
        """Return the KV bytes of one token, all layers."""
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

    def as_node(self, node_id: NodeId, tokens: TokenIds, *, created_at: float) -> Node:
        """Return the node that this draft becomes. `tokens`: the draft's token ids after `token_ids()`."""
        return Node(
            node_id=node_id,
            namespace=self.namespace,
            token_ids=tokens,
            pieces=self.pieces,
            exact_length=self.exact_length,
            deviation=self.deviation,
            created_at=created_at,
            last_used_at=created_at,
            num_hits=0,
            pinned=False,
        )


@dataclass(frozen=True, slots=True)
class Change:
    """One atomic change. A node in `put_nodes` replaces the stored node with its id."""

    put_segments: tuple[Segment, ...] = ()
    put_nodes: tuple[Node, ...] = ()
    parents: Mapping[NodeId, NodeId] = field(default_factory=dict)  # of the new nodes that are not roots
    dropped_nodes: tuple[NodeId, ...] = ()
    heirs: Mapping[NodeId, NodeId] = field(default_factory=dict)  # dropped: new parent of its children
    dropped_segments: tuple[SegmentId, ...] = ()


@dataclass(frozen=True, slots=True)
class Insertion:
    """The node of the inserted prompt, and the segments that no node refers to."""

    node: Node
    created: bool  # False: the prompt was stored already; its use was counted, its pieces may be better
    freed_segments: tuple[SegmentId, ...]  # may include new segments of the draft


@dataclass(frozen=True, slots=True)
class Eviction:
    """The nodes and segments that left the tree."""

    num_nodes: int
    freed_segments: tuple[SegmentId, ...]
    freed_bytes: int


def segment_tokens(capacity_tokens: int) -> int:
    """
    Return the length of segments for a memory that holds this many tokens of KV.

    Memory is freed segment by segment. In a small memory a segment of `SEGMENT_TOKENS` would be a large part
    of it; in a large memory shorter segments would only be more numerous (docs/log.md has figures).
    """
    return max(_MIN_SEGMENT_TOKENS, min(SEGMENT_TOKENS, capacity_tokens // _SEGMENTS_IN_STORE))


def new_segment_id() -> SegmentId:
    """Return a random id. There are so many (2**63 - 1) that no store draws one twice."""
    return SegmentId(secrets.randbelow(2**63 - 1) + 1)


class NodeIds:
    """
    Makes node ids that ascend with time: the later of two prompts has the higher id.

    An id is 41 bits of milliseconds since 2026 and 12 random bits. So an index that is older than the store
    cannot refer to a new prompt by an old id. Not thread-safe; the tree's lock guards it.
    """

    def __init__(self) -> None:
        self._last = 0

    def __call__(self) -> NodeId:
        milliseconds = max(1, int(1000 * (time.time() - _YEAR_2026)))
        self._last = max(self._last + 1, milliseconds << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS))
        return NodeId(self._last)
