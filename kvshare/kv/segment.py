"""
The KV of a contiguous run of tokens that was computed in one go, as immutable tensors.

Who they belong to, where they stood and what they were computed after is `delta_tree.Segment`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash


@dataclass(frozen=True, slots=True, eq=False)
class SegmentKV:
    """K as the model wrote it, rotated for its position, and V; the memory belongs to this object alone."""

    k: torch.Tensor  # (L, T, H, D)
    v: torch.Tensor  # (L, T, H, D)

    @property
    def num_tokens(self) -> int:
        return self.k.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes

    def checksum(self) -> int:
        """xxh3 of all bytes, 63 bits: against accidental corruption only."""
        digest = xxhash.xxh3_64()
        for tensor in (self.k, self.v):
            digest.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)
        return digest.intdigest() >> 1
