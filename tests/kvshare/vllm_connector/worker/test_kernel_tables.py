"""Tables of work that would reach outside of memory are refused. Kernels have tests of their own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from delta_tree import Span
from kvshare.kv.layout import KVLayout
from kvshare.kv.movement import STAYS, Movement
from kvshare.kv.sums import word_of
from kvshare.vllm_connector.worker.kernel_tables import (
    MovementTable,
    StagedCopy,
    StagedPart,
    StagingForm,
    SumTable,
)
from kvshare.vllm_connector.worker.kernel_token_tables import PartTable, TokenTable

CPU = torch.device("cpu")
FORM = StagingForm(num_bytes=4096, dim=8, itemsize=2)
PART = StagedPart(offset=1024, num_tokens=8, first_piece=2, num_pieces=12)  # up to the last byte
COPY = StagedCopy(PART, Span(1, 8), np.arange(9, 16), shift=3)
HALF = Movement((1.0, 0.1, 0.01, 0.001))


def layout(*movements: tuple[Movement | None, Movement | None]) -> KVLayout:
    return KVLayout.uniform(len(movements), 1, 8, dtype=torch.bfloat16, device=CPU).moving(movements)


def tables(*copies: StagedCopy) -> tuple[TokenTable, PartTable]:
    """Of a model of two heads and seven layers."""
    tokens = TokenTable.of(copies, FORM, num_slots=16)
    parts = {number: copy.part for number, copy in enumerate(copies)}
    return tokens, PartTable.of(parts, tokens, FORM, num_heads=2, num_layers=7)


def test_what_just_fits_is_taken() -> None:
    """The last byte, token, slot and piece."""
    tokens, parts = tables(COPY)
    assert tokens.columns.shape == (5, 7)
    assert parts.programs.tolist() == [[0] * 12, list(range(12))]
    assert tokens.shifts.tolist() == [0, 3]
    tables(replace(COPY, part=replace(PART, first_piece=1, of_head=6)))  # the last six layers of both heads


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (replace(COPY, part=replace(PART, offset=1024 + 16)), "ends at byte 4112 of staging, which has 4096"),
        (replace(COPY, part=replace(PART, offset=1000)), "a multiple of 16"),
        (replace(COPY, part=replace(PART, offset=-16)), "offset=-16"),
        (
            replace(COPY, part=replace(PART, num_pieces=13, offset=0)),
            "pieces up to 15 of a cache that has 14",
        ),
        (replace(COPY, part=replace(PART, of_head=6)), "pieces up to 15 of a cache that has 14"),
        (replace(COPY, part=replace(PART, first_piece=-1)), "first_piece=-1"),
        (replace(COPY, source=Span(2, 9)), "not in its segment"),
        (replace(COPY, slots=np.arange(10, 17)), "slots 9 to 16 of a cache that has 16"),
        (replace(COPY, slots=np.arange(-1, 6)), "slots -1 to 15"),
        (replace(COPY, slots=np.arange(6)), "13 slots for 14 tokens"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: StagedCopy, message: str) -> None:
    """Among copies that do: a GPU would read or write memory of somebody else."""
    with pytest.raises(ValueError, match=message):
        tables(COPY, wrong)


def test_a_copy_without_a_part_in_a_batch_has_nothing_to_do() -> None:
    """The tokens of a load have one table; in this batch only the second copy's segment is."""
    longer = replace(COPY, source=Span(0, 8), slots=np.arange(8))
    tokens = TokenTable.of([longer, longer, longer], FORM, num_slots=16)
    parts = PartTable.of(
        {1: PART}, tokens, replace(FORM, num_bytes=1 << 22, dim=2048), num_heads=2, num_layers=7
    )
    assert parts.columns[2].tolist() == [0, 12, 0]
    assert set(parts.programs[0].tolist()) == set(range(8, 16))  # blocks of one token


def test_slots_of_two_copies_are_not_mixed() -> None:
    """One with a slot more does not lend it to one with a slot less."""
    more, less = replace(COPY, slots=np.arange(8)), replace(COPY, slots=np.arange(8, 14))
    with pytest.raises(ValueError, match="each copy must have as many"):
        tables(more, less)


def test_sums_outside_of_staging_are_refused() -> None:
    """As copies are."""
    with pytest.raises(ValueError, match="ends at byte 4112"):
        SumTable.of([PART, replace(PART, offset=1040)], FORM)


def test_nothing_to_do_is_no_error() -> None:
    """Of neither kind."""
    assert tables()[0].columns.shape == (5, 0)
    without_pieces, without_tokens = (
        replace(PART, num_pieces=0),
        replace(COPY, source=Span(3, 3), slots=COPY.slots[:0]),
    )
    _, parts = tables(replace(COPY, part=without_pieces), without_tokens)
    assert parts.programs.size == 0
    assert SumTable.of([], FORM).num_programs == 0


@pytest.mark.parametrize(
    ("row_bytes", "word"),
    [
        (256, torch.int64),
        (12, torch.int64),
        (10, torch.int32),
        (6, torch.int32),
        (3, torch.int16),
        (1, torch.int16),
    ],
)
def test_a_piece_has_whole_words(row_bytes: int, word: torch.dtype) -> None:
    """The widest that two rows are a multiple of."""
    assert word_of(2 * row_bytes) == word


class TestMovements:
    """How rows of each layer move."""

    def test_an_unknown_one_is_refused_if_anything_moves(self) -> None:
        """And named. Copies that stay in place need none."""
        table = MovementTable(layout((HALF, STAYS), (HALF, None)).planes, CPU)
        table.check(np.array([0.0]), torch.bfloat16)
        with pytest.raises(ValueError, match="how v of layer 1 moves is not known"):
            table.check(np.array([0.0, 5.0]), torch.bfloat16)

    def test_bytes_are_not_rotated(self) -> None:
        """They can be copied, or moved where nothing rotates; those of a dtype of 8 bits are numbers."""
        shifts = np.array([0.0, 5.0])
        MovementTable(layout((STAYS, STAYS)).planes, CPU).check(shifts, torch.uint8)
        table = MovementTable(layout((HALF, STAYS)).planes, CPU)
        table.check(np.array([0.0]), torch.uint8)
        with pytest.raises(ValueError, match="uint8 cannot be rotated"):
            table.check(shifts, torch.uint8)
        table.check(shifts, torch.float8_e4m3fn)

    def test_equal_ones_are_one(self) -> None:
        """Angles are computed once for all layers that move alike, and for those that stay not at all."""
        equal = Movement(tuple(HALF.frequencies))
        table = MovementTable(layout((HALF, STAYS), (equal, Movement(first=3))).planes, CPU)
        assert table.number_of.tolist() == [[1, 1], [0, 0]]
        assert table.moves == [True, False]
