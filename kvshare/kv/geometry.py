"""The shape of a model's KV. One alphabet everywhere: L layers, T tokens, H kv heads, D head dim."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """What must be equal before KV of one model can be laid into another's buffer."""

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
