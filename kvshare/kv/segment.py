"""
The KV of a contiguous run of tokens that was computed in one go, as tensors.

Its namespace, its position and the context of its tokens are in `delta_tree.Segment`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash


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

    @property
    def num_tokens(self) -> int:
        return self.planes[0].shape[1]

    @property
    def num_bytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)

    def checksum(self) -> int:
        """xxh3 of all bytes, 63 bits. It detects accidental corruption, not forgery."""
        digest = xxhash.xxh3_64()
        for tensor in self.planes:
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
        return digest.intdigest() >> 1
