"""
Moves stored rows to other positions, and determines and verifies on the model itself how they move.

The row for position p + d is the row for position p rotated by d, with the model's own frequencies: rotations
compose (RoFormer, arXiv:2104.09864, eq. 34; CacheBlend appendix A). A magnitude factor on cos and sin (YaRN)
is in the stored row already and is not applied again. Models, and layers of one model, differ in which
dimensions they rotate, how they pair these, and by which frequencies. So all possibilities are tried.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, get_args

import numpy as np
import torch

from kvshare.kv.to_device import to_device

Pairing = Literal["half", "interleaved"]
_AT_ONCE = 1 << 19  # elements that are rotated together
_FAR = (1, 1009, 100_003)  # shifts in tokens at which two candidates are compared
_SAME = 1e-2  # candidates that differ by less, for rows of unit variance, count as the same
_FAINT = 1e-3  # least scale of a dimension, as a share of that of the largest one
_ROUNDING = 1 / 6  # least distance that counts, as a share of the tolerance: less is only rounding
_CLEARLY = 4.0  # wrong movements must be off by at least so many times the distance of the right one


@lru_cache(maxsize=64)
def _on_device(frequencies: tuple[float, ...], device: torch.device) -> torch.Tensor:
    (table,) = to_device(device, np.array(frequencies))
    return table


@dataclass(frozen=True)  # no slots: cached properties are stored in __dict__
class Movement:
    """
    Rotates dimensions [first, first + 2 F) of a row by position x frequency; all others stay.

    half         dimension i is paired with i + F     (Llama, Qwen, Mistral, Phi)
    interleaved  dimension 2 i is paired with 2 i + 1 (GLM, Cohere, Llama 4)

    Units:  `frequencies`: F numbers, in radians per token; if there are none, rows are equal at all positions
    """

    frequencies: tuple[float, ...] = ()
    pairing: Pairing = "half"
    first: int = 0

    @classmethod
    def turning(cls, table: torch.Tensor, pairing: Pairing = "half", first: int = 0) -> Movement:
        """Make the movement that rotates by a frequency table of the model, (F,)."""
        return cls(tuple(table.detach().float().cpu().tolist()), pairing, first)

    @property
    def end(self) -> int:
        """The end of the dimensions that are rotated."""
        return self.first + 2 * len(self.frequencies)

    @cached_property
    def digest(self) -> str:
        """16 hex digits; KV is not shared between movements of different digests."""
        table = np.array(self.frequencies, dtype=np.float32).tobytes()
        return hashlib.sha256(f"{self.pairing}{self.first}".encode() + table).hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.pairing} {self.first}:{self.end}" if self.frequencies else "stays"

    def moved(self, rows: torch.Tensor, shift: int) -> torch.Tensor:
        """
        Move rows by `shift` positions, computed in float32.

        Shapes:  rows (..., D) -> the same, same dtype; in new memory unless nothing is rotated
        Units:   shift in tokens, may be negative
        """
        if not self.frequencies or shift == 0:
            return rows
        return self.turned(rows, *self.angles(torch.tensor(shift, device=rows.device)))

    def angles(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Return cosines and sines for rows that move by these shifts.

        Shapes:  shifts (...) in tokens -> (..., F) float32 each
        """
        angles = shifts.double()[..., None] * _on_device(self.frequencies, shifts.device)
        return angles.cos().float(), angles.sin().float()

    def turned(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """
        Rotate rows by these angles, in float32. Numbers of 8 bits are clamped, as vLLM does when it stores.

        Shapes:  rows (..., D); cos, sin (..., F), broadcast -> new memory like rows
        """
        moved = torch.empty_like(rows) if rows.shape[-1] == 2 * len(self.frequencies) else rows.clone()
        one, other = self.pairs
        everywhere = (table.expand(*rows.shape[:-1], -1) for table in (cos, sin))
        for part, turned, c, s in _parts(rows, moved, *everywhere):
            x, y = part[..., one].float(), part[..., other].float()
            turned[..., one] = _fitting(x * c - y * s, rows.dtype)
            turned[..., other] = _fitting(y * c + x * s, rows.dtype)
        return moved

    @property
    def pairs(self) -> tuple[slice, slice]:
        """Return the rotated dimensions: the first and the second ones of all pairs."""
        if self.pairing == "interleaved":
            return slice(self.first, self.end, 2), slice(self.first + 1, self.end, 2)
        middle = self.first + len(self.frequencies)
        return slice(self.first, middle), slice(middle, self.end)


STAYS = Movement()


def _fitting(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.itemsize > 1:
        return numbers
    limits = torch.finfo(dtype)
    return numbers.clamp(limits.min, limits.max)


def _parts(*alike: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """
    Cut tensors of one shape alike, into parts whose intermediate results fit into a CPU's cache.

    Allocating megabytes of new memory costs a CPU more than the rotation itself.
    """
    shape = alike[0].shape[:-1]
    if alike[0].device.type != "cpu" or alike[0].numel() <= _AT_ONCE or max(shape, default=1) == 1:
        yield alike
        return
    longest = max(range(len(shape)), key=shape.__getitem__)
    for halves in zip(*(tensor.tensor_split(2, dim=longest) for tensor in alike), strict=True):
        yield from _parts(*halves)


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """
    Rows that one layer computed for the same tokens at two places.

    Shapes:  here, there (T, H, D); `there` was computed `shift` positions further
    """

    here: torch.Tensor
    there: torch.Tensor
    shift: int

    def error_of(self, moved: torch.Tensor) -> float:
        """Return the relative error of moved rows: root mean square, as single bfloat16 values say little."""
        difference = (moved.float() - self.there.float()).square().mean().sqrt()
        return float(difference / self._scales.square().mean().sqrt().clamp(min=1e-9))

    def distance_of(self, moved: torch.Tensor) -> float:
        """
        Return the error with each dimension relative to its scale.

        Otherwise a few large dimensions that rotate slowly would hide the error of all others.
        """
        difference = (moved.float() - self.there.float()).square().flatten(0, 1).mean(0).sqrt()
        scales = self._scales.clamp(min=max(1e-9, _FAINT * float(self._scales.max())))
        return float((difference / scales).square().mean().sqrt())

    @property
    def _scales(self) -> torch.Tensor:
        """(D,) root mean square of each dimension."""
        return self.there.float().square().flatten(0, 1).mean(0).sqrt()


@dataclass(frozen=True, slots=True)
class Verification:
    """The result for the rows of one layer. `movement` is None if no candidate fits, or if unsure."""

    movement: Movement | None
    error: float  # of the best candidate, relative to the rows (root mean square)
    control: float | None  # error of the nearest wrong movement over that of the best; None: no wrong one
    reason: str = ""


def find_movement(
    tables: Sequence[torch.Tensor], observed: Sequence[Observed], *, tolerance: float
) -> Verification:
    """
    Find the movement that takes the rows of each pair from one place to the other, and verify it.

    Candidates are all tables with both pairings, on the first and on the last dimensions, and no rotation at
    all. The right one must fit for all shifts. Wrong ones must not fit: a position close by, the rows of the
    next head, and candidates that rotate differently. So keys that are all zero do not verify a movement.

    Shapes:  tables (F,) each; with F above D / 2 they are those of other layers
    Units:   tolerance as `Verification.error`
    """
    dim = observed[0].here.shape[-1]
    distances = {candidate: _distance(candidate, observed) for candidate in _candidates(tables, dim)}
    movement = min(distances, key=distances.__getitem__)
    error = max(pair.error_of(movement.moved(pair.here, pair.shift)) for pair in observed)
    if not (error <= tolerance and distances[movement] <= 2 * tolerance):
        return Verification(None, error, None, "no table of the model moves these rows")
    wrong = [found for candidate, found in distances.items() if not _is_same(candidate, movement, dim)]
    rounding = tolerance * _ROUNDING
    if movement.frequencies:
        wrong.append(_distance_of_neighbours(movement, observed))
        near = max(1, round(1 / max(movement.frequencies)))  # the fastest pair rotates by a radian
        neighbour_distance = _distance(movement, observed, off_by=near)
        if neighbour_distance > rounding:  # otherwise these rows cannot tell the two positions apart
            wrong.append(neighbour_distance)
    if not wrong:  # without a wrong one to compare with, rows certainly stay only if every bit is equal
        if all(torch.equal(pair.here, pair.there) for pair in observed):
            return Verification(movement, error, None)
        return Verification(None, error, None, "there is no table to try")
    control = min(wrong) / max(distances[movement], rounding)
    if control < _CLEARLY:
        reason = "these rows do not distinguish the right movement from wrong ones"
        return Verification(None, error, control, reason)
    return Verification(movement, error, control)


def why_not_movable(layers: Iterable[tuple[Verification, Verification]]) -> str:
    """Name the first layer whose keys or values cannot be moved, and why; empty if all can."""
    for layer, pair in enumerate(layers):
        for name, found in zip(("keys", "values"), pair, strict=True):
            if found.movement is None:
                return f"{name} of layer {layer}: {found.reason} (relative error {found.error:.2g})"
    return ""


def _candidates(tables: Iterable[torch.Tensor], dim: int) -> Iterator[Movement]:
    """
    Yield no rotation first, as the first of equally good candidates is taken. Tables of layers with larger
    heads are left out.
    """
    yield STAYS
    for table in tables:
        if 0 < 2 * len(table) <= dim:
            for first in (0, dim - 2 * len(table)):
                yield from (Movement.turning(table, pairing, first) for pairing in get_args(Pairing))


def _distance(movement: Movement, observed: Iterable[Observed], *, off_by: int = 0) -> float:
    """Return the largest distance over all shifts, with rows moved `off_by` positions too far."""
    return max(pair.distance_of(movement.moved(pair.here, pair.shift + off_by)) for pair in observed)


def _distance_of_neighbours(movement: Movement, observed: Iterable[Observed]) -> float:
    """Return the distance to rows of the next head; with one head, to those of the next token."""
    distances = []
    for pair in observed:
        axis = 1 if pair.here.shape[1] > 1 else 0
        distances.append(pair.distance_of(movement.moved(pair.here, pair.shift).roll(1, dims=axis)))
    return max(distances)


def _is_same(one: Movement, other: Movement, dim: int) -> bool:
    """Return whether two candidates move all rows alike, as with tables that differ by rounding only."""
    rows = torch.randn(8, dim, generator=torch.Generator().manual_seed(0))
    apart = ((one.moved(rows, far) - other.moved(rows, far)).abs().max() for far in _FAR)
    return all(float(difference) < _SAME for difference in apart)
