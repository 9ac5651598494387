"""
Tables that the kernels of `kernels.py` read: which pieces lie where in a staging buffer, and which slots
their tokens have. Arrays on the host, made without a loop over tokens; nothing here needs a GPU or Triton.

    segment    [head][layer][k, v][token][dim], T tokens
    piece      one (head, layer) of a segment: 2 T D elements. Piece p is of head p // L and layer p % L
    part       pieces of one segment, one after the other in a staging buffer: consecutive ones, or the same
               layers of every head. Batches are cut at pieces
    token      a column of the table: all that a program needs to find the token's rows in its copy's part
    block      consecutive tokens of the table. A program copies one block's rows of one piece of each token

All batches of a load share one table of its tokens. The places of its parts differ by batch.

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
TILE_BYTES = 4096  # of K that a program copies, and as many of V; half as many if numbers have 8 bits
MOVABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2)
CHUNK_WORDS = 4096  # words that a program adds up


@dataclass(frozen=True, slots=True)
class StagedPart:
    """
    `num_pieces` pieces of a segment of `num_tokens` tokens: consecutive ones from `first_piece` on, or, if
    `of_head` is not 0, so many of each head; those of the next head have numbers that are L higher.

    Units:  offset of the first piece in bytes from the start of the buffer, a multiple of `ALIGNMENT`
    """

    offset: int
    num_tokens: int
    first_piece: int
    num_pieces: int
    of_head: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class StagedCopy:
    """
    Tokens of the segment to which a part belongs, and their slots in vLLM's cache.

    Shapes:  slots (len(source),), from `PagedCache.slot_numbers`
    Units:   source in tokens of the segment; shift in positions, may be negative; a gather ignores it
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
        """Number of elements of which all offsets are multiples."""
        return gcd(self.dim, ALIGNMENT // self.itemsize)

    @property
    def block(self) -> int:
        """Number of tokens that a program copies, a power of two."""
        element = max(2, self.itemsize)  # numbers of 8 bits take as many registers while they are rotated
        return max(1, TILE_BYTES // element >> (self.dim - 1).bit_length())

    def table(self, parts: Sequence[StagedPart]) -> NDArray[np.int64]:
        """
        Return (5, P): offset, tokens, first piece, number of pieces, number of consecutive pieces.

        Raises:  ValueError if a part is not aligned, or not whole in staging
        """
        described = [
            (p.offset, p.num_tokens, p.first_piece, p.num_pieces, p.of_head or max(1, p.num_pieces))
            for p in parts
        ]
        table = np.array(described, np.int64).reshape(-1, 5).T
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

    Shapes:  columns (3, T) int64: slot that is read, slot that is written, index of its shift
             shifts (S,); the first one is 0
    """

    columns: NDArray[np.int64]
    shifts: NDArray[np.float64]

    @classmethod
    def of(cls, copies: Sequence[tuple[NDArray[np.int64], NDArray[np.int64], int]]) -> SlotTable:
        """`copies`: (slots to read, slots to write, shift). ValueError if the numbers of slots differ."""
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
    One column for each part. Its pieces are cut into chunks, and each program adds up one chunk.

    Shapes:  columns (4, P) int64: the part's first program; its offset in words; words of a piece; the number
             of its first piece among all pieces of all parts
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

    Dimension d of a row becomes  x[d] cos + x[partner of d] sin.  The frequency has the sign of the sine.

    Shapes:  number_of (2, L) int32, the number of K's and V's movement; partners (M, D) int32; frequencies
             (M, D) float64, in radians per token. Movement 0 leaves rows as they are
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
        """Raises ValueError if rows must move, but a movement is unknown, or `dtype` cannot be rotated."""
        if shifts.any() and self._unknown:
            raise ValueError(f"how {self._unknown[0]} moves is not known")
        if shifts.any() and any(self.moves) and dtype not in MOVABLE:
            raise ValueError(f"rows of {dtype} cannot be rotated")

    def angles(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return cosines, and sines with the sign of their dimension. Computed in float64: in float32, the angle
        of a shift of 100,000 tokens would have no digits left for its fraction.

        Shapes:  shifts (S,) float64 -> (S, M, D) float32 each; if the only shift is 0, placeholders (1,)
        """
        if len(shifts) == 1:
            return self._nothing, self._nothing
        angles = shifts[:, None, None] * self._frequencies
        cos, sin = (torch.empty(angles.shape, device=angles.device) for _ in range(2))
        return torch.cos(angles, out=cos), torch.sin(angles, out=sin)


def _of_dimensions(movement: Movement, dim: int) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """
    Return each dimension's partner (itself if it does not rotate) and its frequency, which is negative for
    the first dimension of a pair: that becomes x cos - y sin.
    """
    partners, frequencies = np.arange(dim, dtype=np.int32), np.zeros(dim)
    if movement.frequencies:
        one, other = movement.pairs
        partners[one], partners[other] = partners[other], partners[one].copy()
        frequencies[one] = [-frequency for frequency in movement.frequencies]
        frequencies[other] = movement.frequencies
    return partners, frequencies
