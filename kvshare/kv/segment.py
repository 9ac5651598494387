"""
KV as tensors: its shape, and that of a contiguous run of tokens that was computed in one go.

Who they belong to, where they stood and what they were computed after is `delta_tree.Segment`'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """
    The shape of a model's KV: what must be equal before KV of one model can be laid into another's buffer.

    One alphabet everywhere: L layers, T tokens, H kv heads, D head dim.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers, in bytes."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def shape(self, num_tokens: int) -> tuple[int, int, int, int]:
        """(L, T, H, D)."""
        return (self.num_layers, num_tokens, self.num_kv_heads, self.head_dim)

    def empty(self, num_tokens: int) -> torch.Tensor:
        """An uninitialised (L, T, H, D) tensor on the model's device."""
        return torch.empty(self.shape(num_tokens), dtype=self.dtype, device=self.device)


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
