"""
Single elements of K and V in a layer's cache, by their offset in memory, for any layout and strides.

Alphabet: N tokens per block, H kv heads of this rank, D head dim; P slots.
"""

from __future__ import annotations

import torch

from kvshare.vllm_connector.worker.block_layout import BlockLayout
from kvshare.vllm_connector.worker.cache_dtype import INTEGERS


class CacheElements:
    """The elements of layers with this layout and the shape of `cache`, (B, H, N, 2 D)."""

    def __init__(self, layout: BlockLayout, cache: torch.Tensor) -> None:
        self._layout = layout
        self._sizes, self._device = cache.shape[1:], cache.device
        self._known: dict[tuple[int, ...], torch.Tensor] = {}  # by strides, which layers have in common

    def offsets(self, strides: tuple[int, ...], slots: torch.Tensor) -> torch.Tensor:
        """Return the offsets of the K and V of slots in a cache. Shapes:  (P,) -> (2, P, H, D)"""
        blocks, inside = slots // self._sizes[1], slots % self._sizes[1]
        return (blocks * strides[0])[:, None, None] + self._in_block(strides[1:])[:, inside]

    def read(self, cache: torch.Tensor, offsets: torch.Tensor, into: torch.Tensor) -> None:
        """
        Copy single elements. To copy the whole blocks of a few rows would move megabytes.

        Shapes:  into as offsets, contiguous
        """
        torch.index_select(_memory(cache), 0, offsets.flatten(), out=into.view(-1))

    def write(self, cache: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor) -> None:
        """Write elements, bit by bit. Shapes:  rows as offsets"""
        bits = INTEGERS[cache.itemsize]
        _memory(cache).view(bits)[offsets] = rows.contiguous().view(bits)

    def _in_block(self, strides: tuple[int, ...]) -> torch.Tensor:
        """Return the offset of each element of K and V from its block's first element, (2, N, H, D)."""
        if strides not in self._known:
            sizes = zip(self._sizes, strides, strict=True)
            h, n, d = (torch.arange(size, device=self._device) * step for size, step in sizes)
            places = (h[:, None, None] + n[:, None] + d).unsqueeze(0)
            self._known[strides] = torch.stack([read(places)[0] for read in self._layout.planes])
        return self._known[strides]


def _memory(cache: torch.Tensor) -> torch.Tensor:
    """Return the cache's memory as one flat view, up to its last element."""
    last = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    return cache.as_strided((last + 1,), (1,))
