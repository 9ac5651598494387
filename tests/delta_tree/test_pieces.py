"""Piece tables."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from delta_tree import EditRangeError, Piece, PieceTable, SegmentId

pieces = st.lists(
    st.builds(
        Piece,
        st.integers(1, 3).map(SegmentId),
        st.integers(0, 6),
        st.integers(1, 5),
    ),
    max_size=8,
)


def stored(table: list[Piece]) -> list[tuple[int, int]]:
    """Per position, which token of which segment."""
    return [(p.segment_id, p.offset + i) for p in table for i in range(p.length)]


@given(pieces)
def test_every_position_is_covered_exactly_once(rows: list[Piece]) -> None:
    """The rows of a table follow each other from 0 to its end; merging changes no position."""
    table = PieceTable(rows)
    at = 0
    for row, piece in zip(table.rows(), table, strict=True):
        assert row == (at, piece.segment_id, piece.offset, piece.length)
        at += piece.length
    assert at == table.num_tokens == sum(piece.length for piece in rows)
    assert stored(list(table)) == stored(rows)
    assert not any((b.segment_id, b.offset) == (a.segment_id, a.end) for a, b in pairwise(table))
    assert table.segment_ids == {piece.segment_id for piece in rows}


@given(pieces)
def test_tables_are_values(rows: list[Piece]) -> None:
    """Tables over the same positions are equal, however they were cut."""
    singles = [Piece(p.segment_id, p.offset + i, 1) for p in rows for i in range(p.length)]
    assert PieceTable(singles) == PieceTable(rows)
    assert hash(PieceTable(singles)) == hash(PieceTable(rows))
    assert PieceTable(PieceTable(rows)) == PieceTable(rows)
    assert PieceTable.from_bytes(PieceTable(rows).to_bytes()) == PieceTable(rows)


@pytest.mark.parametrize("blob", [bytes(23), bytes(24)])
def test_bytes_that_are_no_table_are_refused(blob: bytes) -> None:
    """Neither a part of a row is a table, nor a piece of no tokens."""
    with pytest.raises(EditRangeError):
        PieceTable.from_bytes(blob)


@pytest.mark.parametrize(("segment_id", "offset", "length"), [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_impossible_pieces_are_refused(segment_id: int, offset: int, length: int) -> None:
    """A piece is a stretch of at least one token of a real segment."""
    with pytest.raises(EditRangeError):
        Piece(SegmentId(segment_id), offset, length)


def test_repr_counts() -> None:
    """What ends up in a log says how much."""
    assert repr(PieceTable([Piece(SegmentId(1), 0, 4)])) == "PieceTable(4 tokens in 1 pieces)"
