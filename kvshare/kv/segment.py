"""
KV as tensors: a contiguous run of tokens that was computed in one go.

Who they belong to, where they stood and what they were computed after is `delta_tree.Segment`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash


class KeysAndValues:
    """The two planes of a model whose layers are alike, by name."""

    __slots__ = ()
    planes: tuple[torch.Tensor, ...]

    @property
    def k(self) -> torch.Tensor:
        """(L, T, H, D) of a model whose layers are alike."""
        k, _ = self.planes
        return k

    @property
    def v(self) -> torch.Tensor:
        """(L, T, H, D) of a model whose layers are alike."""
        _, v = self.planes
        return v


@dataclass(frozen=True, slots=True, eq=False)
class SegmentKV(KeysAndValues):
    """
    Rows as the model wrote them, rotated for their positions; the memory belongs to this object alone.

    Shapes:  `planes` as the layout has them, (L, T, H, D) each
    """

    planes: tuple[torch.Tensor, ...]

    @property
    def num_tokens(self) -> int:
        return self.planes[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def checksum(self) -> int:
        """xxh3 of all bytes, 63 bits: against accidental corruption only."""
        digest = xxhash.xxh3_64()
        for tensor in self.planes:
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
        return digest.intdigest() >> 1
