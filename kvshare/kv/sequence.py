"""
KV as tensors: that of a running sequence, with one slot for each position, and of the segments cut from it.

The namespace of a segment, its position and the context of its tokens are in `delta_tree.Segment`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Copy, SegmentId, Span
from kvshare.kv.layout import KVLayout
from kvshare.kv.sums import combined, copy_and_sum, sums


class KeysAndValues:
    """Names for the two planes of a model whose layers all have the same shapes."""

    __slots__ = ()
    planes: tuple[torch.Tensor, ...]

    @property
    def k(self) -> torch.Tensor:
        """(L, T, H, D)."""
        k, _ = self.planes
        return k

    @property
    def v(self) -> torch.Tensor:
        """(L, T, H, D)."""
        _, v = self.planes
        return v


@dataclass(frozen=True, slots=True, eq=False)
class SegmentKV(KeysAndValues):
    """
    Rows as the model wrote them, rotated for their positions, in memory that nothing else uses.

    Shapes:  (L, T, H, D) for each plane of the layout
    """

    planes: tuple[torch.Tensor, ...]
    copied_checksum: int | None = None  # computed when the rows were copied here

    @classmethod
    def of_rows(cls, layout: KVLayout, num_tokens: int, rows: Sequence[NDArray[np.uint8]]) -> Self:
        """
        Make a segment of this layout from the result of `rows`, in the same memory.

        Shapes:  one (L, bytes of a layer) for each plane
        """
        return cls(
            tuple(
                torch.from_numpy(plane).view(layout.dtype).view(described.shape(num_tokens))
                for plane, described in zip(rows, layout.planes, strict=True)
            )
        )

    def rows(self) -> tuple[NDArray[np.uint8], ...]:
        """Return the bytes of each plane, (L, bytes of a layer), in the same memory."""
        return tuple(plane.contiguous().flatten(1).view(torch.uint8).numpy() for plane in self.planes)

    @property
    def num_tokens(self) -> int:
        return self.planes[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def checksum(self) -> int:
        """Return the sum of the bytes as they were copied. It detects accidental corruption, not forgery."""
        return self.computed_checksum() if self.copied_checksum is None else self.copied_checksum

    def computed_checksum(self) -> int:
        """Return the combined sum of the bytes as they are now, see `sums.py`."""
        of_planes = []
        for plane in self.planes:
            _, _, num_heads, dim = plane.shape
            row_bytes = num_heads * dim * plane.itemsize
            of_planes.append(sums(plane.contiguous().flatten(1), row_bytes=row_bytes).cpu())
        return combined(torch.cat(of_planes))


class SequenceKV(KeysAndValues):
    """
    Slots [0, capacity) of one sequence; slot = position.

        planes: (L, capacity, H, D) each        [0, num_tokens) is valid once copied or computed
                                                [num_tokens, capacity) is free

    The token axis comes before the heads: a span of one layer is contiguous in memory, and writing a copy is
    one memcpy for each layer. Attention uses transposed views, which cost nothing.
    """

    def __init__(self, layout: KVLayout, capacity: int) -> None:
        self.layout = layout
        self.planes = layout.empty(capacity)
        self.is_whole = True  # False: some layers lack slots that no later token sees

    @property
    def capacity(self) -> int:
        return self.planes[0].shape[1]

    @property
    def bytes_per_token(self) -> int:
        """Return the KV bytes of one slot in all layers."""
        return self.layout.bytes_per_token

    def reserve(self, num_tokens: int) -> None:
        """Grow to at least `num_tokens` slots. The capacity doubles, so that decoding copies rarely."""
        held = self.capacity
        if num_tokens <= held:
            return
        grown = self.layout.empty(max(num_tokens, 2 * held))
        for new, old in zip(grown, self.planes, strict=True):
            new[:, :held] = old
        self.planes = grown

    def write(self, layer: int, positions: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write new rows, k and v (H, N, D), into their slots; positions (N,) int64."""
        for name, rows in (("k", k), ("v", v)):
            self._of(name, layer).index_copy_(0, positions, rows.transpose(0, 1))

    def layer(self, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of K and V in slots [0, num_tokens), (1, H, T, D) each."""
        k, v = (self._of(name, layer)[:num_tokens].transpose(0, 1).unsqueeze(0) for name in ("k", "v"))
        return k, v

    def write_copies(
        self,
        copies: Sequence[Copy],
        segments: Mapping[SegmentId, SegmentKV],
        *,
        computed: Sequence[Span] | None = None,
    ) -> int:
        """
        Write every copy into its target slots: the paper's KV editor. All other slots stay as they are.

        Rows are always moved from the original segment, never from a copy that was moved before. With
        `computed`, layers with windows or chunks get only the slots that these spans and later tokens see.
        Returns: bytes written
        Raises:  ValueError if a copy moves and the movement of this model's rows is not known
        Source:  KVShare, arXiv:2503.16525, section 4.2
        """
        num_bytes = 0
        for part in self.layout.parts(computed):
            self.is_whole = self.is_whole and part.slots is None
            plane, target = self.layout.planes[part.plane], self.planes[part.plane]
            for copy in copies:
                stored = segments[copy.segment_id].planes[part.plane]
                slots = [copy.target] if part.slots is None else map(copy.target.intersection, part.slots)
                for span in slots:
                    if not len(span):
                        continue
                    start = copy.offset + span.start - copy.target_start
                    rows = stored[part.rows, start : start + len(span)].to(target.device, non_blocking=True)
                    rows = plane.moved(rows, copy.shift, layers=part.rows)
                    target[part.rows, span.start : span.end] = rows
                    num_bytes += rows.nbytes
        return num_bytes

    def cut(self, span: Span) -> SegmentKV:
        """Copy the KV of a span into new host memory, and compute its checksum in the same pass."""
        planes = tuple(
            torch.empty((len(rows), len(span), *rows.shape[2:]), dtype=rows.dtype) for rows in self.planes
        )
        of_planes = [
            copy_and_sum(copied, rows[:, span.start : span.end])
            for copied, rows in zip(planes, self.planes, strict=True)
        ]
        return SegmentKV(planes, combined(torch.cat(of_planes)))

    def fork(self, num_tokens: int) -> SequenceKV:
        """Return a new sequence that begins with the first `num_tokens` of this one."""
        other = SequenceKV(self.layout, self.capacity)
        other.is_whole = self.is_whole
        for new, old in zip(other.planes, self.planes, strict=True):
            new[:, :num_tokens] = old[:, :num_tokens]
        return other

    def _of(self, name: str, layer: int) -> torch.Tensor:
        """Return a view of one layer's "k" or "v", (capacity, H, D)."""
        plane, row = self.layout.places[name, layer]
        return self.planes[plane][row]
