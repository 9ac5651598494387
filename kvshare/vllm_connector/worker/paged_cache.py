"""
vLLM's paged KV cache: one slot per token, in all layers.

    position   0 .. N-1      N .. 2N-1     2N ..        N = block_size
    block      block_ids[0]  block_ids[1]  block_ids[2]
    slot       block id * N + position % N

vLLM's own kernels write rows. They would round rows of 8 bits (`cache_dtype.py`) again, so those are written
into memory as they are. Rows are read by the layout inside a block, see `block_layout.py`. For every backend
a layer's cache has the shape (B, H, N, 2 D), with any strides.

Alphabet: B blocks, N tokens per block, H kv heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from delta_tree import Span
from kvshare.kv.layout import KVLayout
from kvshare.kv.movement import Movement
from kvshare.kv.sequence import SegmentKV
from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.block_layout import BlockLayout, by_block, find_layout
from kvshare.vllm_connector.worker.block_slots import BlockSlots
from kvshare.vllm_connector.worker.cache_dtype import (
    EIGHT_BITS,
    as_numbers,
    scale_of,
    stored_dtype,
    to_be_stored,
)
from kvshare.vllm_connector.worker.cache_elements import CacheElements


class PagedCache(BlockSlots):
    """
    The layers' caches of this worker.

    `layers` are vLLM's attention modules by name: rows are written through `impl` and read from `kv_cache`
    (B, H, N, 2 D). `block_size` is the scheduler's; kernels may use smaller blocks, of N tokens. `dtype`: the
    dtype of the rows that vLLM computes; it only matters if the cache has 8 bits.
    """

    def __init__(
        self, layers: Mapping[str, Any], *, block_size: int, dtype: torch.dtype = torch.float32
    ) -> None:
        first: torch.Tensor = next(iter(layers.values())).kv_cache
        super().__init__(block_size, kernel_block_size=first.shape[2], device=first.device)
        self.layers = dict(layers)
        self._computed_dtype = dtype
        self._in_order = list(self.layers.values())
        shapes = [(layer.kv_cache.shape[1], layer.kv_cache.shape[3] // 2) for layer in self._in_order]
        self.kv_layout = KVLayout.of_shapes(
            [(shape, shape) for shape in shapes], dtype=stored_dtype(self._in_order[0]), device=first.device
        )
        self._layout: BlockLayout | None = None
        self._form = self._current_form()

    @property
    def parts(self) -> tuple[PagedCache, ...]:
        """Return the caches of layers of one shape. Copies are made part by part."""
        return (self,)

    @property
    def layers_of_parts(self) -> Sequence[Sequence[int]]:
        """Return the numbers that the layers of each part have in the model, ascending."""
        return (range(len(self._in_order)),)

    def set_movements(self, movements: Sequence[tuple[Movement | None, Movement | None]]) -> None:
        """Set how each layer's K and V move to other positions."""
        self.kv_layout = self.kv_layout.moving(movements)

    @property
    def num_blocks(self) -> int:
        """Return the number of the scheduler's blocks, including block 0."""
        return len(self._in_order[0].kv_cache) * self.kernel_block_size // self.block_size

    @property
    def is_quantised(self) -> bool:
        """Return whether numbers are stored in 8 bits."""
        return self.kv_layout.dtype in EIGHT_BITS

    @property
    def computed_dtype(self) -> torch.dtype:
        """Return the dtype of the rows that vLLM's kernels receive."""
        return self._computed_dtype if self.is_quantised else self.kv_layout.dtype

    @property
    def layout(self) -> str:
        return self._layout.name if self._layout is not None else "unknown"

    @property
    def has_same_form(self) -> bool:
        """Return whether the layers' caches have the shapes, strides, dtypes and device of the start."""
        return self._form == self._current_form()

    def _current_form(self) -> list[tuple[object, ...]]:
        caches = (layer.kv_cache for layer in self._in_order)
        return [(cache.shape, cache.stride(), cache.dtype, cache.device) for cache in caches]

    def find_layout(self, block_id: int) -> str | None:
        """Determine how blocks are read, by writing to an unused one. Returns why that failed, or None."""
        if len({layer.kv_cache.shape for layer in self._in_order}) != 1:
            return "the layers' KV caches have different shapes"
        if len(dtypes := {stored_dtype(layer) for layer in self._in_order}) != 1:
            return f"the layers' KV caches have different dtypes: {', '.join(sorted(map(str, dtypes)))}"
        if self.block_size % self.kernel_block_size:
            return f"kernel blocks of {self.kernel_block_size} tokens do not divide {self.block_size}"
        slots = self.slots((block_id,), Span(0, self.kernel_block_size))
        block = self._cache(0)[self.kernel_blocks((block_id,), Span(0, 1))[0]]
        self._layout = find_layout(block, lambda k, v: self.write_by_kernel(0, k, v, slots))
        if self._layout is None:
            return "the layout of the attention backend's KV cache is unknown"
        return None

    @cached_property
    def elements(self) -> CacheElements:
        assert self._layout is not None
        return CacheElements(self._layout, self._cache(0))

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """
        Write rows into slots of all layers.

        Shapes:  k, v (L, T, H, D) of the cache's dtype; slots (T,)
        """
        for index in range(len(self.layers)):
            self.write_layer(index, k[index], v[index], slots)

    def write_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows of one layer. Shapes:  k, v (T, H, D); slots (T,)"""
        if not self.is_quantised:
            self.write_by_kernel(layer, k, v, slots)
            return
        cache = self._cache(layer)
        self.elements.write(cache, self.elements.offsets(cache.stride(), slots), torch.stack((k, v)))

    def write_by_kernel(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows by vLLM's own kernel; rows of 8 bits as the numbers that it quantises to these rows."""
        module = self._in_order[layer]
        if self.is_quantised:
            k, v = (
                to_be_stored(rows, scale_of(module, name), self.computed_dtype)
                for rows, name in ((k, "k"), (v, "v"))
            )
        module.impl.do_kv_cache_update(module, k, v, module.kv_cache, slots)

    def read(self, block_ids: Sequence[int], span: Span) -> SegmentKV:
        """Copy a span's KV to the host, (L, len(span), H, D)."""
        keys, _ = self.kv_layout.planes
        shape = (keys.num_heads, self.kv_layout.num_layers, 2, len(span), keys.dim)
        rows = torch.empty(shape, dtype=self.kv_layout.dtype, device=self.kv_layout.device)
        self.gather(block_ids, [span], [rows])
        k, v = (rows[:, :, plane].permute(1, 2, 0, 3).cpu() for plane in range(2))
        return SegmentKV((k, v))

    @property
    def caches(self) -> list[torch.Tensor]:
        """Return the caches of all layers, (B, H, N, 2 D). They may be other tensors after vLLM has slept."""
        return [self._cache(layer) for layer in range(len(self._in_order))]

    def _cache(self, layer: int) -> torch.Tensor:
        cache: torch.Tensor = self._in_order[layer].kv_cache
        return cache.view(self.kv_layout.dtype) if self.is_quantised else cache

    def gather(self, block_ids: Sequence[int], spans: Sequence[Span], into: Sequence[torch.Tensor]) -> None:
        """
        Copy the KV of spans, with one gather per layer for all of them.

        Shapes:  into (H, L, 2, len(span), D) each, on the device
        """
        for _ in self.gather_by_layer(block_ids, spans, into):
            pass

    def gather_by_layer(
        self, block_ids: Sequence[int], spans: Sequence[Span], into: Sequence[torch.Tensor]
    ) -> Iterator[int]:
        """Do the same as `gather`, and yield the number of each layer once its KV is copied."""
        everything = range(len(self._in_order))
        return self._gather(block_ids, spans, [(everything, rows) for rows in into])

    def gather_layers(
        self, block_ids: Sequence[int], spans: Sequence[Span], into: Sequence[tuple[range, torch.Tensor]]
    ) -> None:
        """Copy only some layers of each span. Shapes:  into (H, len(layers), 2, len(span), D) each"""
        for _ in self._gather(block_ids, spans, into):
            pass

    def _gather(
        self, block_ids: Sequence[int], spans: Sequence[Span], into: Sequence[tuple[range, torch.Tensor]]
    ) -> Iterator[int]:
        assert self._layout is not None
        size = self.kernel_block_size
        tables = [self.kernel_blocks(block_ids, span) for span in spans]
        numbers = np.array([block for table in tables for block in table], np.int64)
        (blocks,) = to_device(self.kv_layout.device, numbers)
        places, num_before = [], 0
        for span, table in zip(spans, tables, strict=True):
            ahead = num_before + span.start % self.block_size
            places.append(list(by_block(Span(ahead, ahead + len(span)), size)))
            num_before += len(table) * size
        for index, cache in enumerate(self.caches):
            wanted = [
                (rows[:, index - layers.start], at)
                for (layers, rows), at in zip(into, places, strict=True)
                if index in layers
            ]
            if not wanted:
                continue
            copied = cache.index_select(0, blocks)
            for plane, read in enumerate(self._layout.planes):
                rows = read(copied)
                for target, pieces in wanted:
                    start = 0
                    for blocks_there, inside in pieces:
                        piece = rows[blocks_there, inside].permute(2, 0, 1, 3)
                        end = start + piece.shape[1] * piece.shape[2]
                        target[:, plane, start:end].view(piece.shape)[:] = piece
                        start = end
            yield index

    def keys(self, layer: int, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """
        Return K of one layer at positions [0, num_tokens), (T, H, D) on the device; of 8 bits as float32.

        `table`: the kernel blocks of these positions
        """
        assert self._layout is not None
        cache, read = self._cache(layer), self._layout.planes[0]
        if self._layout.reads_views:  # otherwise V would be copied, too, and K twice
            keys = read(cache).index_select(0, table).flatten(0, 1)[:num_tokens]
        else:
            keys = read(cache.index_select(0, table)).flatten(0, 1)[:num_tokens]
        return as_numbers(keys, scale_of(self._in_order[layer], "k")) if self.is_quantised else keys

    def value_numbers(self, rows: torch.Tensor) -> torch.Tensor:
        """Convert stored V of the first L layers, (L, T, H, D), to numbers in float32."""
        if not self.is_quantised:
            return rows.float()
        return torch.stack([self.values_of(layer, own) for layer, own in enumerate(rows)])

    def values_of(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Convert stored V of one layer, (T, H, D), to numbers in float32."""
        return as_numbers(rows, scale_of(self._in_order[layer], "v")) if self.is_quantised else rows.float()
