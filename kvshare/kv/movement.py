"""
How stored rows move to other positions, and the proof of it against the model itself.

A rotated row for position p + d is the stored one turned by d, with the model's own frequencies: rotations
compose (RoFormer, arXiv:2104.09864, eq. 34; CacheBlend appendix A). A magnitude factor on cos and sin (YaRN)
is already in the stored row and is not applied twice. Models differ in which dimensions turn, in how these
are paired, in their tables of frequencies, and from layer to layer; what a model does is found by trying.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np
import torch

Pairing = Literal["half", "interleaved"]
_AT_ONCE = 1 << 19  # elements that are turned together
_FAR = (1, 1009, 100_003)  # tokens
_SAME = 1e-2  # of rows of unit variance
_FAINT = 1e-3  # of the largest dimension: those below count as if they were so large
_ROUNDING = 1 / 6  # of the tolerance: what a distance is at least taken to be
_CLEARLY = 4.0  # times as far off


@dataclass(frozen=True)  # no slots: the table lives in __dict__
class Movement:
    """
    Dimensions [first, first + 2 F) of a row turn by position x frequency; all others stay.

    half         dimension i is paired with i + F     (Llama, Qwen, Mistral, Phi)
    interleaved  dimension 2 i is paired with 2 i + 1 (GLM, Cohere, Llama 4)

    Units:  `frequencies` in radians a token, F of them; none: rows are the same at every position
    """

    frequencies: tuple[float, ...] = ()
    pairing: Pairing = "half"
    first: int = 0

    @classmethod
    def turning(cls, table: torch.Tensor, pairing: Pairing = "half", first: int = 0) -> Movement:
        """By a model's own table, (F,)."""
        return cls(tuple(table.detach().float().cpu().tolist()), pairing, first)

    @property
    def end(self) -> int:
        """Behind the last dimension that turns."""
        return self.first + 2 * len(self.frequencies)

    @cached_property
    def _table(self) -> torch.Tensor:
        return torch.tensor(self.frequencies, dtype=torch.float64)

    @cached_property
    def digest(self) -> str:
        """16 hex digits; rows that moved otherwise are other rows."""
        table = np.array(self.frequencies, dtype=np.float32).tobytes()
        return hashlib.sha256(f"{self.pairing}{self.first}".encode() + table).hexdigest()[:16]

    def __str__(self) -> str:
        if not self.frequencies:
            return "stays"
        return f"{self.pairing} {self.first}:{self.end}"

    def moved(self, rows: torch.Tensor, shift: int) -> torch.Tensor:
        """
        Rows `shift` positions further, computed in float32.

        Shapes:  rows (..., D) -> the same, same dtype; new memory where anything turns
        Units:   shift in tokens, may be negative
        """
        if not self.frequencies or shift == 0:
            return rows
        return self.turned(rows, *self.angles(torch.tensor(shift, device=rows.device)))

    def angles(self, shifts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        Cosines and sines for rows that move so far.

        Shapes:  shifts (...) in tokens -> (..., F) float32 each
        """
        angles = shifts.double()[..., None] * self._table.to(shifts.device)
        return angles.cos().float(), angles.sin().float()

    def turned(self, rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """
        Rows turned by these angles, computed in float32.

        Shapes:  rows (..., D); cos, sin (..., F), broadcast -> new memory like rows
        """
        moved = torch.empty_like(rows) if rows.shape[-1] == 2 * len(self.frequencies) else rows.clone()
        one, other = self._pairs
        everywhere = (table.expand(*rows.shape[:-1], -1) for table in (cos, sin))
        for part, turned, c, s in _parts(rows, moved, *everywhere):
            x, y = part[..., one].float(), part[..., other].float()
            turned[..., one] = x * c - y * s
            turned[..., other] = y * c + x * s
        return moved

    @property
    def _pairs(self) -> tuple[slice, slice]:
        """The dimensions that turn, those of a pair at the same place of both."""
        if self.pairing == "interleaved":
            return slice(self.first, self.end, 2), slice(self.first + 1, self.end, 2)
        middle = self.first + len(self.frequencies)
        return slice(self.first, middle), slice(middle, self.end)


STAYS = Movement()


def _parts(*alike: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """
    Tensors of one shape cut in the same way, so that what is made of a part stays near a processor.

    Fresh memory of megabytes costs more there than turning what is in it.
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
    The same tokens computed at two places, as one layer stored them.

    Shapes:  here, there (T, H, D); `there` was computed `shift` positions further
    """

    here: torch.Tensor
    there: torch.Tensor
    shift: int

    def error_of(self, moved: torch.Tensor) -> float:
        """Root of the mean square, in units of the rows' own: in bfloat16 single values say little."""
        difference = (moved.float() - self.there.float()).square().mean().sqrt()
        return float(difference / self._scales.square().mean().sqrt().clamp(min=1e-9))

    def distance_of(self, moved: torch.Tensor) -> float:
        """
        The same with each dimension in units of its own.

        A few large dimensions that turn slowly would hide what all others do.
        """
        difference = (moved.float() - self.there.float()).square().flatten(0, 1).mean(0).sqrt()
        scales = self._scales.clamp(min=max(1e-9, _FAINT * float(self._scales.max())))
        return float((difference / scales).square().mean().sqrt())

    @property
    def _scales(self) -> torch.Tensor:
        """(D,) root of each dimension's mean square."""
        return self.there.float().square().flatten(0, 1).mean(0).sqrt()


@dataclass(frozen=True, slots=True)
class Proof:
    """What was found of one layer's rows. `movement` None: nothing fits, or not for certain."""

    movement: Movement | None
    error: float  # of the best candidate, in units of the rows: root of the mean square
    control: float | None  # how many times further off what must not fit is, at least; None: there is nothing
    reason: str = ""


def prove(tables: Sequence[torch.Tensor], observed: Sequence[Observed], *, tolerance: float) -> Proof:
    """
    The movement that takes the rows of each pair from one place to the other.

    Every table is tried with both pairings on the first and the last dimensions, and no rotation at all. What
    fits must fit for all shifts, and what is nearly right must not: a position close by, the next head,
    another candidate that says something else. So keys that are all zero prove nothing.

    Shapes:  tables (F,) each, F at most D / 2
    Units:   tolerance as `Proof.error`
    """
    dim = observed[0].here.shape[-1]
    candidates = list(_candidates(tables, dim))
    distances = [_distance(candidate, observed) for candidate in candidates]
    best = int(np.argmin(distances))
    movement = candidates[best]
    error = max(pair.error_of(movement.moved(pair.here, pair.shift)) for pair in observed)
    if not (error <= tolerance and distances[best] <= 2 * tolerance):
        return Proof(None, error, None, "no table of the model's moves these rows")
    wrong = [
        distance
        for candidate, distance in zip(candidates, distances, strict=True)
        if not _is_same(candidate, movement, dim)
    ]
    rounding = tolerance * _ROUNDING
    if movement.frequencies:
        wrong.append(_distance_of_neighbours(movement, observed))
        near = max(1, round(1 / max(movement.frequencies)))  # where the fastest has turned by a radian
        if (beside := _distance(movement, observed, beside=near)) > rounding:  # else that is nothing here
            wrong.append(beside)
    if not wrong:  # nothing to compare with: then only what is the same to the last bit is known to stay
        same = all(torch.equal(pair.here, pair.there) for pair in observed)
        return Proof(movement if same else None, error, None, "" if same else "there is no table to try")
    control = min(wrong) / max(distances[best], rounding)
    if control < _CLEARLY:
        return Proof(None, error, control, "these rows do not tell the right movement from wrong ones")
    return Proof(movement, error, control)


def _candidates(tables: Iterable[torch.Tensor], dim: int) -> Iterator[Movement]:
    """Each once. No rotation first: of equals the simplest is taken."""
    found = {STAYS: None}
    for table in tables:
        for first in (0, dim - 2 * len(table)):
            if first >= 0 and len(table):
                found.update({Movement.turning(table, pairing, first): None for pairing in get_args(Pairing)})
    yield from found


def _distance(movement: Movement, observed: Iterable[Observed], *, beside: int = 0) -> float:
    """The largest over all shifts; `beside`: so many positions too far."""
    return max(pair.distance_of(movement.moved(pair.here, pair.shift + beside)) for pair in observed)


def _distance_of_neighbours(movement: Movement, observed: Iterable[Observed]) -> float:
    """Every head's rows taken for the next one's; of a single head the next token's."""
    found = []
    for pair in observed:
        beside = 1 if pair.here.shape[1] > 1 else 0
        found.append(pair.distance_of(movement.moved(pair.here, pair.shift).roll(1, dims=beside)))
    return max(found)


def _is_same(one: Movement, other: Movement, dim: int) -> bool:
    """Whether two candidates do the same to any row, however far: tables that differ by rounding."""
    rows = torch.randn(8, dim, generator=torch.Generator().manual_seed(0))
    apart = ((one.moved(rows, far) - other.moved(rows, far)).abs().max() for far in _FAR)
    return all(float(difference) < _SAME for difference in apart)
