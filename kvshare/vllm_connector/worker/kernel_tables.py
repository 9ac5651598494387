"""
What the kernels of `kernels.py` read: which pieces lie where in a staging buffer, and which slots their
tokens have. Arrays on the host, made without a loop over tokens; nothing here needs a GPU or Triton.

    segment    [head][layer][k, v][token][dim], T tokens
    piece      one (head, layer) of a segment: 2 T D elements. Piece p is of head p // L and layer p % L
    part       pieces of one segment, one after the other in a staging buffer: consecutive ones, or the same
               layers of every head. Batches are cut at pieces
    token      a column of the table: all that a program needs to find the token's rows in its copy's part
    block      consecutive tokens of the table. A program copies one block's rows of one piece of each token

The tokens of a load have one table for all of its batches; where its parts lie differs by batch.

Alphabet: L layers, T tokens, H kv heads of this rank, D head dim; C copies, M movements, S shifts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.layout import Plane
from kvshare.kv.movement import STAYS, Movement
from kvshare.kv.sums import word_of
from kvshare.kv.to_device import to_device

ALIGNMENT = 16  # bytes, of parts in staging: the widest load of a GPU's thread
TILE_BYTES = 4096  # of K, and as many of V, that a program copies; half of 8 bits
MOVABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
CHUNK_WORDS = 4096  # that a program adds up


@dataclass(frozen=True, slots=True)
class StagedPart:
    """
    Pieces of a segment of `num_tokens` tokens: consecutive ones from `first_piece` on; where `of_head` is not
    0, so many of each head, L further than those of the head before.

    Units:  offset of the first one in bytes from the buffer's begin, a multiple of `ALIGNMENT`
    """

    offset: int
    num_tokens: int
    first_piece: int
    num_pieces: int
    of_head: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StagedCopy:
    """
    Tokens of the segment that a part belongs to, and their slots in vLLM's cache.

    Shapes:  slots (len(source),), as `PagedCache.slot_numbers` gives them
    Units:   source in tokens of the segment; shift in positions, may be negative, is ignored by a gather
    """

    part: StagedPart
    source: Span
    slots: NDArray[np.int64]
    shift: int = 0

    @property
    def num_tokens(self) -> int:
        return self.part.num_tokens


@dataclass(frozen=True, slots=True)
class StagingForm:
    """The bytes of staging, and the form of a row: D elements of K or V."""

    num_bytes: int
    dim: int
    itemsize: int

    @property
    def row_bytes(self) -> int:
        return self.dim * self.itemsize

    @property
    def unit(self) -> int:
        """Elements of which all offsets are multiples."""
        return gcd(self.dim, ALIGNMENT // self.itemsize)

    @property
    def block(self) -> int:
        """Tokens that a program copies, a power of two."""
        element = max(2, self.itemsize)  # numbers of 8 bits take as many registers while they are rotated
        return max(1, TILE_BYTES // element >> (self.dim - 1).bit_length())

    def table(self, parts: Sequence[StagedPart]) -> NDArray[np.int64]:
        """
        (5, P): offset, tokens, first piece, number of pieces, and how many of them follow each other.

        Raises:  ValueError if a part is not aligned, or not whole in staging
        """
        each = [
            (p.offset, p.num_tokens, p.first_piece, p.num_pieces, p.of_head or max(1, p.num_pieces))
            for p in parts
        ]
        table = np.array(each, np.int64).reshape(-1, 5).T
        offset, num_tokens, _, num_pieces, _ = table
        ends = offset + num_pieces * num_tokens * 2 * self.row_bytes
        wrong = (offset % ALIGNMENT != 0) | (table < 0).any(axis=0) | (ends > self.num_bytes)
        if wrong.any():
            number = int(wrong.argmax())
            raise ValueError(
                f"{parts[number]} ends at byte {ends[number]} of staging, which has {self.num_bytes}: "
                f"its begin must be a multiple of {ALIGNMENT}"
            )
        return table


@dataclass(frozen=True, slots=True, eq=False)
class SlotTable:
    """
    One column for each token that is copied inside the cache.

    Shapes:  columns (3, T) int64: slot that is read, slot that is written, number of its shift
             shifts (S,); the first one is 0
    """

    columns: NDArray[np.int64]
    shifts: NDArray[np.float64]

    @classmethod
    def of(cls, copies: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], int]]) -> SlotTable:
        """`copies`: slots that are read, as many that are written, shift. Else it raises ValueError."""
        numbers: dict[int, int] = {0: 0}
        parts = [np.zeros((3, 0), np.int64)]
        for source, slots, shift in copies:
            if len(source) != len(slots):
                raise ValueError(f"{len(slots)} slots for {len(source)} tokens: each copy must have as many")
            number = numbers.setdefault(shift, len(numbers))
            parts.append(np.stack([source, slots, np.full(len(slots), number, np.int64)]))
        return cls(np.concatenate(parts, axis=1), np.array(list(numbers), np.float64))

    def check(self, *, num_slots: int) -> None:
        """Raises ValueError for slots that a cache does not have."""
        slots = self.columns[:2]
        if slots.size and not 0 <= slots.min() <= slots.max() < num_slots:
            raise ValueError(f"slots {slots.min()} to {slots.max()} of a cache that has {num_slots}")


@dataclass(frozen=True, slots=True, eq=False)
class SumTable:
    """
    One column for each part: its pieces are cut into chunks, and a program adds up one chunk.

    Shapes:  columns (4, P) int64: its first program; where it begins, in words; words of a piece; its first
             piece in the order of all pieces of all parts
    """

    columns: NDArray[np.int64]
    word: torch.dtype
    num_programs: int
    num_pieces: int

    @classmethod
    def of(cls, parts: Sequence[StagedPart], staging: StagingForm) -> SumTable:
        """Raises ValueError if a part reaches past staging."""
        word = word_of(2 * staging.row_bytes)  # K and V of a token
        offset, num_tokens, _, num_pieces, _ = staging.table(parts)
        words = num_tokens * 2 * staging.row_bytes // word.itemsize
        programs = num_pieces * -(-words // CHUNK_WORDS)
        columns = np.array(
            [
                np.cumsum(programs) - programs,
                offset // word.itemsize,
                words,
                np.cumsum(num_pieces) - num_pieces,
            ]
        )
        return cls(columns, word, int(programs.sum()), int(num_pieces.sum()))


class MovementTable:
    """
    How rows of each layer move, on the device. Made once for a model.

    Dimension d of a row becomes  x[d] cos + x[partner of d] sin,  with the sign of the sine in the frequency.

    Shapes:  number_of (2, L) int32, of K's and V's movement; partners (M, D) int32; frequencies (M, D)
             float64, in radians a token. Movement 0 stays
    """

    def __init__(self, planes: Sequence[Plane], device: torch.device) -> None:
        """`planes`: K's and V's, of all layers and of one shape, as `KVLayout.uniform` makes them."""
        self._unknown = [
            f"{plane.name} of layer {layer}"
            for plane in planes
            for layer, movement in enumerate(plane.movements)
            if movement is None
        ]
        own = [[movement or STAYS for movement in plane.movements] for plane in planes]
        of_rotation: dict[Movement, int] = {STAYS: 0}
        numbers = [
            [of_rotation.setdefault(m, len(of_rotation)) if m.frequencies else 0 for m in movements]
            for movements in own
        ]
        self.moves = [any(of_plane) for of_plane in numbers]  # K, V
        tables = [_of_dimensions(movement, planes[0].dim) for movement in of_rotation]
        self.number_of, self.partners, self._frequencies = to_device(
            device,
            np.array(numbers, np.int32),
            np.array([partners for partners, _ in tables], np.int32),
            np.array([frequencies for _, frequencies in tables], np.float64),
        )
        self._nothing = torch.zeros(1, device=device)

    def check(self, shifts: NDArray[np.float64], dtype: torch.dtype) -> None:
        """Raises ValueError if rows are to move, and it is not known how, or `dtype` cannot be rotated."""
        if shifts.any() and self._unknown:
            raise ValueError(f"how {self._unknown[0]} moves is not known")
        if shifts.any() and any(self.moves) and dtype not in MOVABLE:
            raise ValueError(f"rows of {dtype} cannot be rotated")

    def angles(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Cosines, and sines with the sign of their dimension. Computed in float64: the angle of a shift of
        100,000 tokens has no digits left for its fraction in float32.

        Shapes:  shifts (S,) float64 -> (S, M, D) float32 each; without another shift than 0 of any size
        """
        if len(shifts) == 1:
            return self._nothing, self._nothing
        angles = shifts[:, None, None] * self._frequencies
        cos, sin = (torch.empty(angles.shape, device=angles.device) for _ in range(2))
        return torch.cos(angles, out=cos), torch.sin(angles, out=sin)


def _of_dimensions(movement: Movement, dim: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """
    The dimension that each is paired with, itself if it stays, and its frequency: negative for the first one
    of a pair, as that becomes x cos - y sin.
    """
    partners, frequencies = np.arange(dim, dtype=np.int32), np.zeros(dim)
    if movement.frequencies:
        one, other = movement.pairs
        partners[one], partners[other] = partners[other], partners[one].copy()
        frequencies[one] = [-frequency for frequency in movement.frequencies]
        frequencies[other] = movement.frequencies
    return partners, frequencies
