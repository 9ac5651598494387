"""
Tables that the kernels of `kernels.py` read about copies: the tokens of a load, once for all of its batches,
and the place of each batch in staging. See `kernel_tables.py`, also for the alphabet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.vllm_connector.worker.kernel_tables import StagedPart, StagingForm


class Rows(Protocol):
    """Tokens of a segment, their slots and by how many positions they move. See `StagedCopy`."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the whole segment."""

    @property
    def source(self) -> Span: ...
    @property
    def slots(self) -> NDArray[np.int64]: ...
    @property
    def shift(self) -> int: ...


@dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """
    One column for each token of all copies.

    Shapes:  columns (5, T) int64: offset of its row of K from that of its segment's first token, in units;
             number of tokens of its segment; number of its copy; slot; number of its shift
             shifts (S,); the first one is 0
             lengths (C,) of the copies
    """

    columns: NDArray[np.int64]
    shifts: NDArray[np.float64]
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, copies: Sequence[Rows], staging: StagingForm, *, num_slots: int) -> TokenTable:
        """Raises ValueError for a copy that reaches past its segment or the cache."""
        numbers: dict[int, int] = {0: 0}
        shift = [numbers.setdefault(copy.shift, len(numbers)) for copy in copies]
        source = np.array([(copy.source.start, copy.source.end) for copy in copies], np.int64).reshape(-1, 2)
        start, lengths = source[:, 0], source[:, 1] - source[:, 0]
        slots = np.concatenate([np.zeros(0, np.int64), *(copy.slots for copy in copies)])
        num_tokens = np.array([copy.num_tokens for copy in copies], np.int64)
        if [len(copy.slots) for copy in copies] != lengths.tolist():
            raise ValueError(f"{len(slots)} slots for {lengths.sum()} tokens: each copy must have as many")
        if (start < 0).any() or (source[:, 1] > num_tokens).any():
            raise ValueError("a copy has tokens that are not in its segment")
        if len(slots) and not 0 <= slots.min() <= slots.max() < num_slots:
            raise ValueError(f"slots {slots.min()} to {slots.max()} of a cache that has {num_slots}")
        first = start - (np.cumsum(lengths) - lengths)
        of_copies = np.array([first, num_tokens, np.arange(len(copies)), lengths, shift], np.int64)
        columns = np.repeat(of_copies.reshape(5, -1), lengths, axis=1)
        columns[0] = (columns[0] + np.arange(len(slots))) * (staging.dim // staging.unit)
        columns[3] = slots
        return cls(columns, np.array(list(numbers), np.float64), lengths)


@dataclass(frozen=True, slots=True, eq=False)
class PartTable:
    """
    The place of each copy's part in staging, and the work of each program.

    Shapes:  columns (4, C) int64: offset in units; first piece; number of pieces, 0 if the copy has no part
             in this batch; number of consecutive pieces
             programs (2, P) int32: block of tokens; number of the piece in the part of each of these tokens
    """

    columns: NDArray[np.int64]
    programs: NDArray[np.int32]

    @classmethod
    def of(
        cls,
        parts: Mapping[int, StagedPart],
        tokens: TokenTable,
        staging: StagingForm,
        *,
        num_heads: int,
        num_layers: int,
    ) -> PartTable:
        """
        `parts`: by the number of their copy.

        Raises:  ValueError for a part that reaches past staging or the cache
        """
        offset, _, first, count, of_head = staging.table(list(parts.values()))
        last = first + (count - 1) // of_head * num_layers + (count - 1) % of_head
        if (last >= num_heads * num_layers).any():
            raise ValueError(f"pieces up to {last.max() + 1} of a cache that has {num_heads * num_layers}")
        columns = np.zeros((4, len(tokens.lengths)), np.int64)
        columns[3] = 1
        columns[:, list(parts)] = offset // (staging.itemsize * staging.unit), first, count, of_head
        return cls(columns, _programs(np.repeat(columns[2], tokens.lengths), staging.block))


def _programs(counts: NDArray[np.int64], block: int) -> NDArray[np.int32]:
    """Make as many programs for a block of tokens as its parts have pieces, so that none is idle."""
    most = np.maximum.reduceat(counts, np.arange(0, len(counts), block)) if len(counts) else counts
    blocks = np.repeat(np.arange(len(most), dtype=np.int32), most)
    before = np.repeat((np.cumsum(most) - most).astype(np.int32), most)
    return np.array([blocks, np.arange(len(blocks), dtype=np.int32) - before])
