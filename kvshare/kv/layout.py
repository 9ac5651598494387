"""
The rows that a model stores for each token: their shapes, their layers, how they move to other positions, and
how layers attend to them.

    plane   rows of one kind that some layers store: "k" and "v"; with latent attention (MLA) the latent and
            the rotated part of the keys. All layers of a plane have rows of the same shape.

Letters in shapes: L layers of a plane, T tokens, H kv heads, D head dim.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Self

import torch

from delta_tree import Span, merge
from kvshare.kv.movement import STAYS, Movement


@dataclass(frozen=True, slots=True)
class Reach:
    """The slots that a token sees, up to its own: all, the last `size`, or those in its chunk of `size`."""

    size: int | None = None
    is_chunked: bool = False

    def first(self, position: int) -> int:
        """Return the first slot that a token at this position sees."""
        return int(self.firsts(torch.tensor(position)))

    def firsts(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the first slots that tokens at these positions see: (N,) -> (N,)."""
        if self.size is None:
            return torch.zeros_like(positions)
        if self.is_chunked:
            return positions // self.size * self.size
        return (positions - self.size + 1).clamp(min=0)

    def seen(self, computed: Sequence[Span]) -> tuple[Span, ...] | None:
        """Return the slots that tokens of these spans see, merged; None for all slots."""
        if self.size is None:
            return None
        return merge([Span(self.first(span.start), span.end) for span in computed])

    def __str__(self) -> str:
        if self.size is None:
            return "all earlier tokens"
        return f"chunks of {self.size}" if self.is_chunked else f"the last {self.size}"


ALL_EARLIER = Reach()


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """
    The differences of a layer's attention from softmax over all earlier slots.

    `softcap`: tanh caps the scores at this value (Gemma 2). `sinks`: (H_q,) one more score for each head,
    which takes part in the softmax but has no value (gpt-oss).
    """

    reach: Reach = ALL_EARLIER
    softcap: float | None = None
    sinks: torch.Tensor | None = None


PLAIN = AttentionForm()


@dataclass(frozen=True, slots=True)
class Plane:
    """
    Rows (H, D) of each token in these layers.

    `movements`: for each layer, how its rows move to another position; None if that is not known.
    """

    name: str  # "k" or "v": the first and the second argument of the model's own cache
    layers: tuple[int, ...]
    num_heads: int
    dim: int
    movements: tuple[Movement | None, ...]

    def shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        """(L, T, H, D)."""
        return (len(self.layers), num_tokens, self.num_heads, self.dim)

    def moved(
        self, rows: torch.Tensor, shift: int, *, layers: slice | Sequence[int] = slice(None)
    ) -> torch.Tensor:
        """
        Move rows of this plane, or of some of its layers, by `shift` positions.

        Shapes:  rows (L, ..., D) -> the same
        Units:   shift in tokens, may be negative
        Raises:  ValueError for a shift other than 0 if a movement is not known
        """
        if shift == 0:
            return rows
        own = range(len(self.movements))[layers] if isinstance(layers, slice) else layers
        parts, start = [], 0
        for movement, alike in groupby(self.movements[layer] for layer in own):
            if movement is None:
                raise ValueError(
                    f"cannot move a copy by {shift} tokens: "
                    f"the movement of this model's {self.name} is not known"
                )
            end = start + len(list(alike))
            parts.append(movement.moved(rows[start:end], shift))
            start = end
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class Part:
    """Some layers of a plane, and the slots that they need; None for all slots."""

    plane: int
    rows: slice | list[int]  # the layers, by their place in the plane
    slots: tuple[Span, ...] | None


@dataclass(frozen=True)  # no slots: cached properties are stored in __dict__
class KVLayout:
    """
    The form of a model's KV. Only KV of the same form can be written into a buffer.

    `reaches`: for each layer, which slots its tokens see; empty while that is not known.
    """

    planes: tuple[Plane, ...]
    dtype: torch.dtype
    device: torch.device
    reaches: tuple[Reach, ...] = ()

    @classmethod
    def of_shapes(
        cls,
        shapes: Sequence[tuple[tuple[int, int], tuple[int, int]]],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Make a layout from (H, D) of each layer's two kinds of rows; their movements are not known yet."""
        planes = []
        for index, name in enumerate(("k", "v")):
            of_shape: dict[tuple[int, int], list[int]] = {}
            for layer, both in enumerate(shapes):
                of_shape.setdefault(both[index], []).append(layer)
            planes += [
                Plane(name, tuple(layers), *shape, movements=(None,) * len(layers))
                for shape, layers in of_shape.items()
            ]
        return cls(tuple(planes), dtype, device)

    @classmethod
    def uniform(
        cls, num_layers: int, num_heads: int, dim: int, *, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """Make a layout with K and V of one shape in all layers; their movements are not known yet."""
        return cls.of_shapes([((num_heads, dim),) * 2] * num_layers, dtype=dtype, device=device)

    def moving(self, movements: Sequence[tuple[Movement | None, Movement | None]]) -> Self:
        """Return this layout with the movements of each layer's two kinds of rows."""
        one = {movement: movement for pair in movements for movement in pair}  # equal ones are one object
        planes = []
        for plane in self.planes:
            own = (movements[layer][0 if plane.name == "k" else 1] for layer in plane.layers)
            planes.append(replace(plane, movements=tuple(one[movement] for movement in own)))
        return replace(self, planes=tuple(planes))

    def seeing(self, reaches: Sequence[Reach]) -> Self:
        return replace(self, reaches=tuple(reaches))

    def parts(self, computed: Sequence[Span] | None) -> Iterator[Part]:
        """
        Yield groups of layers of a plane that need the same slots when these (ascending) spans are computed.

        Later tokens, such as those of an answer, see no further back than the last of these spans does. If
        `computed` is None, all slots are needed.
        """
        for number, plane in enumerate(self.planes):
            if computed is None or all(self._reach(layer).size is None for layer in plane.layers):
                yield Part(number, slice(None), None)
                continue
            of_reach: dict[Reach, list[int]] = {}
            for row, layer in enumerate(plane.layers):
                of_reach.setdefault(self._reach(layer), []).append(row)
            for reach, rows in of_reach.items():
                yield Part(number, rows, reach.seen(computed))

    def _reach(self, layer: int) -> Reach:
        return self.reaches[layer] if self.reaches else ALL_EARLIER

    @cached_property
    def num_layers(self) -> int:
        return len({layer for plane in self.planes for layer in plane.layers})

    @cached_property
    def bytes_per_token(self) -> int:
        return sum(len(p.layers) * p.num_heads * p.dim for p in self.planes) * self.dtype.itemsize

    @cached_property
    def places(self) -> dict[tuple[str, int], tuple[int, int]]:
        """For each (name, layer), the number of its plane, and the layer's place in that plane."""
        return {
            (plane.name, layer): (number, row)
            for number, plane in enumerate(self.planes)
            for row, layer in enumerate(plane.layers)
        }

    def of_layer(self, rows: Sequence[torch.Tensor], layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer, from the rows of all planes. Shapes:  rows (L, ...) -> (...) each"""
        k, v = (rows[number][row] for number, row in (self.places[name, layer] for name in ("k", "v")))
        return k, v

    @property
    def can_move(self) -> bool:
        return all(movement is not None for plane in self.planes for movement in plane.movements)

    @property
    def rotation(self) -> Movement | None:
        """Return the rotation of the keys if all layers have the same and values do not move; else None."""
        movements = {
            name: {m for p in self.planes if p.name == name for m in p.movements} for name in ("k", "v")
        }
        if len(movements["k"]) != 1 or movements["v"] != {STAYS}:
            return None
        return next(iter(movements["k"]))

    def empty(self, num_tokens: int) -> tuple[torch.Tensor, ...]:
        """Allocate (L, T, H, D) for each plane, uninitialised, on the model's device."""
        return tuple(
            torch.empty(plane.shape(num_tokens), dtype=self.dtype, device=self.device)
            for plane in self.planes
        )

    def __str__(self) -> str:
        """Write the planes as name:LxHxD, for people and namespaces."""
        return ",".join(f"{p.name}:{len(p.layers)}x{p.num_heads}x{p.dim}" for p in self.planes)

    @property
    def digest(self) -> str:
        """Hash of all movements (16 hex digits): layouts that move rows differently do not share KV."""
        parts = (
            f"{plane.name}{layer}:{movement.digest if movement is not None else '?'}"
            for plane in self.planes
            for layer, movement in zip(plane.layers, plane.movements, strict=True)
        )
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
