"""
vLLM's paged KV cache, as far as laying and reading needs it: one slot per token, all layers.

    position   0 .. N-1      N .. 2N-1     2N ..        N = block_size
    block      block_ids[0]  block_ids[1]  block_ids[2]
    slot       block id * N + position % N
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from delta_tree import Span
from kvshare.kv.segment import SegmentKV
from kvshare.vllm_connector.worker.block_layout import BlockLayout, find_layout


class PagedCache:
    """
    The layers' caches of this worker.

    `layers` are vLLM's attention modules by name: `impl` writes, `kv_cache` (B, H, N, 2 D) is read. A kernel
    may use smaller blocks than the scheduler; `block_size` is the scheduler's, N the kernel's.
    """

    def __init__(self, layers: Mapping[str, Any], *, block_size: int) -> None:
        self.layers = dict(layers)
        self.block_size = block_size
        first = self._cache(next(iter(self.layers.values())))
        self.num_heads, self.kernel_block_size = first.shape[1], first.shape[2]
        self.head_dim = first.shape[3] // 2
        self.dtype, self.device = first.dtype, first.device
        self._layout: BlockLayout | None = None

    @staticmethod
    def _cache(layer: Any) -> torch.Tensor:
        cache: torch.Tensor = layer.kv_cache
        return cache

    @property
    def layer_names(self) -> list[str]:
        return list(self.layers)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers of this rank."""
        return 2 * len(self.layers) * self.num_heads * self.head_dim * self.dtype.itemsize

    @property
    def layout(self) -> str:
        return self._layout.name if self._layout is not None else "unknown"

    def check(self) -> str | None:
        """Why this cache cannot be used, or None."""
        if len({self._cache(layer).shape for layer in self.layers.values()}) != 1:
            return "the layers' KV caches have different shapes"
        if self.block_size % self.kernel_block_size:
            return f"kernel blocks of {self.kernel_block_size} tokens do not divide {self.block_size}"
        return None

    def find_layout(self, block_id: int) -> bool:
        """Find out how blocks are read, with a block that nobody uses. Returns whether it is known now."""
        slots = self.slots((block_id,), Span(0, self.kernel_block_size))
        layer = next(iter(self.layers.values()))
        block = self._cache(layer)[self.kernel_blocks((block_id,))[0]]
        self._layout = find_layout(block, lambda k, v: self._write_layer(layer, k, v, slots))
        return self._layout is not None

    def kernel_blocks(self, block_ids: Sequence[int]) -> list[int]:
        """The block table in the kernel's blocks."""
        ratio = self.block_size // self.kernel_block_size
        return [block_id * ratio + part for block_id in block_ids for part in range(ratio)]

    def slots(self, block_ids: Sequence[int], span: Span) -> torch.Tensor:
        """Slots of the positions in `span`, (len(span),) int64 on the device."""
        positions = torch.arange(span.start, span.end)
        table = torch.tensor(block_ids, dtype=torch.int64)
        slots = table[positions // self.block_size] * self.block_size + positions % self.block_size
        return slots.to(self.device)

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """
        Put rows into slots, by each layer's own kernel.

        Shapes:  k, v (L, T, H, D) of the cache's dtype; slots (T,)
        """
        for index, layer in enumerate(self.layers.values()):
            self._write_layer(layer, k[index], v[index], slots)

    def read(self, block_ids: Sequence[int], span: Span) -> SegmentKV:
        """A copy of a span's KV on the host, (L, len(span), H, D)."""
        assert self._layout is not None
        first = span.start // self.kernel_block_size
        end = -(-span.end // self.kernel_block_size)
        blocks = torch.tensor(self.kernel_blocks(block_ids)[first:end], device=self.device)
        ahead = span.start - first * self.kernel_block_size
        shape = (len(self.layers), len(span), self.num_heads, self.head_dim)
        k, v = (torch.empty(shape, dtype=self.dtype) for _ in range(2))
        for index, layer in enumerate(self.layers.values()):
            rows = self._layout.rows(self._cache(layer).index_select(0, blocks))
            for target, source in zip((k, v), rows, strict=True):
                target[index] = source.flatten(0, 1)[ahead : ahead + len(span)]
        return SegmentKV(k, v)

    def _write_layer(self, layer: Any, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        layer.impl.do_kv_cache_update(layer, k, v, self._cache(layer), slots)
