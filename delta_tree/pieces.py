"""
Piece tables: which stretch of which stored segment holds the KV of each position of a prompt.

A table covers the whole prompt, so reading a prompt's KV never visits its ancestors. checks.py checks that
the segments exist.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NewType

import numpy as np
import numpy.typing as npt

from delta_tree.errors import EditRangeError

SegmentId = NewType("SegmentId", int)
"""A positive 63-bit integer, drawn at random so that it is never used twice."""

MAX_INT64 = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Piece:
    """`length` tokens of a segment, from its token `offset` on."""

    segment_id: SegmentId
    offset: int
    length: int

    def __post_init__(self) -> None:
        if not 0 < self.segment_id <= MAX_INT64:
            raise EditRangeError(f"segment id {self.segment_id} is no positive 63-bit integer")
        if self.offset < 0 or self.length <= 0:
            raise EditRangeError(
                f"a piece needs offset >= 0 and length > 0, got {self.offset} and {self.length}"
            )

    @property
    def end(self) -> int:
        """Offset in the segment just after the piece."""
        return self.offset + self.length

    def continues(self, previous: "Piece") -> bool:
        """Whether this piece starts where `previous` ends, in the same segment."""
        return self.segment_id == previous.segment_id and self.offset == previous.end


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
        """
        A table from its `to_bytes`.

        Raises:  EditRangeError if the bytes are not whole rows of possible pieces
        """
        if len(rows) % 24:
            raise EditRangeError(f"{len(rows)} bytes are no whole number of 24-byte pieces")
        table = cls(())
        table._rows = rows
        return cls(table)  # builds each Piece, which checks itself

    @property
    def num_tokens(self) -> int:
        """Positions covered."""
        return int(self._table()[:, 2].sum())

    @property
    def segment_ids(self) -> frozenset[SegmentId]:
        """The segments referred to."""
        return frozenset(SegmentId(row) for row in self._table()[:, 0].tolist())

    def first(self, num_tokens: int) -> "PieceTable":
        """The pieces of the first `num_tokens` positions."""
        pieces = []
        for start, segment_id, offset, length in self.rows():
            if start < num_tokens:
                pieces.append(Piece(segment_id, offset, min(length, num_tokens - start)))
        return PieceTable(pieces)

    def to_bytes(self) -> bytes:
        """The table's rows (segment id, offset, length) as little-endian int64."""
        return self._rows

    def __iter__(self) -> Iterator[Piece]:
        for segment_id, offset, length in self._table().tolist():
            yield Piece(SegmentId(segment_id), offset, length)

    def __len__(self) -> int:
        return len(self._rows) // 24

    def rows(self) -> list[tuple[int, SegmentId, int, int]]:
        """Each piece as (position in the prompt, segment id, offset, length); faster than iterating."""
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
    """The same pieces, neighbours that continue each other joined into one."""
    merged: list[Piece] = []
    for piece in pieces:
        if merged and piece.continues(merged[-1]):
            merged[-1] = replace(merged[-1], length=merged[-1].length + piece.length)
        else:
            merged.append(piece)
    return merged
