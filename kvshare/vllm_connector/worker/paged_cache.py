"""
vLLM's paged KV cache: one slot per token, in all layers.

    position   0 .. N-1      N .. 2N-1     2N ..        N = block_size
    block      block_ids[0]  block_ids[1]  block_ids[2]
    slot       block id * N + position % N

Rows are written by vLLM's own kernels. They are read by the layout inside a block, see `block_layout.py`. For
every backend a layer's cache has the shape (B, H, N, 2 D), with any strides.

Alphabet: B blocks, N tokens per block, H kv heads of this rank, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.layout import KVLayout
from kvshare.kv.sequence import SegmentKV
from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.block_layout import BlockLayout, find_layout


class PagedCache:
    """
    The layers' caches of this worker.

    `layers` are vLLM's attention modules by name: rows are written through `impl` and read from `kv_cache`
    (B, H, N, 2 D). `block_size` is the scheduler's; kernels may use smaller blocks, of N tokens.
    """

    def __init__(self, layers: Mapping[str, Any], *, block_size: int) -> None:
        self.layers = dict(layers)
        self._in_order = list(self.layers.values())
        self.block_size = block_size
        first = self._in_order[0].kv_cache
        _, num_heads, _, width = first.shape
        self.kernel_block_size: int = first.shape[2]
        self.kv_layout = KVLayout.uniform(
            len(self.layers), num_heads, width // 2, dtype=first.dtype, device=first.device
        )
        self._layout: BlockLayout | None = None
        self._known_offsets: dict[tuple[int, ...], torch.Tensor] = {}  # by strides
        self._form = self._current_form()

    @property
    def num_blocks(self) -> int:
        """The scheduler's blocks, with block 0."""
        return len(self._in_order[0].kv_cache) * self.kernel_block_size // self.block_size

    @property
    def layout(self) -> str:
        return self._layout.name if self._layout is not None else "unknown"

    @property
    def has_same_form(self) -> bool:
        """Whether the layers' caches are as at the start, if in other memory: shapes, strides, dtypes."""
        return self._form == self._current_form()

    def _current_form(self) -> list[tuple[object, ...]]:
        caches = (layer.kv_cache for layer in self._in_order)
        return [(cache.shape, cache.stride(), cache.dtype, cache.device) for cache in caches]

    def find_layout(self, block_id: int) -> str | None:
        """Determine how blocks are read, with an unused block. Returns why that failed, or None."""
        if len({layer.kv_cache.shape for layer in self._in_order}) != 1:
            return "the layers' KV caches have different shapes"
        if self.block_size % self.kernel_block_size:
            return f"kernel blocks of {self.kernel_block_size} tokens do not divide {self.block_size}"
        slots = self.slots((block_id,), Span(0, self.kernel_block_size))
        block = self._in_order[0].kv_cache[self.kernel_blocks((block_id,), Span(0, 1))[0]]
        self._layout = find_layout(block, lambda k, v: self.write_layer(0, k, v, slots))
        if self._layout is None:
            return "the layout of the attention backend's KV cache is unknown"
        return None

    def kernel_blocks(self, block_ids: Sequence[int], span: Span) -> list[int]:
        """The kernel blocks of a span."""
        ratio = self.block_size // self.kernel_block_size
        blocks = self._blocks_of(block_ids, span)
        return [block_id * ratio + part for block_id in blocks for part in range(ratio)]

    def _blocks_of(self, block_ids: Sequence[int], span: Span) -> Sequence[int]:
        """The blocks of a span only: a long prompt has hundreds of spans and thousands of blocks."""
        return block_ids[span.start // self.block_size : -(-span.end // self.block_size)]

    def slots(self, block_ids: Sequence[int], span: Span) -> torch.Tensor:
        """Slots of the positions in `span`, (len(span),) int64 on the device."""
        (slots,) = to_device(self.kv_layout.device, self.slot_numbers(block_ids, span))
        return slots

    def slot_numbers(self, block_ids: Sequence[int], span: Span) -> NDArray[np.int64]:
        """The same as `slots`, as an array on the host."""
        first = span.start // self.block_size
        positions = np.arange(span.start, span.end)
        table = np.array(self._blocks_of(block_ids, span), np.int64)
        slots: NDArray[np.int64] = table[positions // self.block_size - first] * self.block_size
        return slots + positions % self.block_size

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """
        Write rows into slots by each layer's own kernel.

        Shapes:  k, v (L, T, H, D) of the cache's dtype; slots (T,)
        """
        for index in range(len(self.layers)):
            self.write_layer(index, k[index], v[index], slots)

    def write_layer(self, layer: int, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """The same for one layer. Shapes:  k, v (T, H, D); slots (T,)"""
        module = self._in_order[layer]
        module.impl.do_kv_cache_update(module, k, v, module.kv_cache, slots)

    def read(self, block_ids: Sequence[int], span: Span) -> SegmentKV:
        """A copy of a span's KV on the host, (L, len(span), H, D)."""
        keys, _ = self.kv_layout.planes
        shape = (keys.num_heads, self.kv_layout.num_layers, 2, len(span), keys.dim)
        rows = torch.empty(shape, dtype=self.kv_layout.dtype, device=self.kv_layout.device)
        self.gather(block_ids, [span], [rows])
        k, v = (rows[:, :, plane].permute(1, 2, 0, 3).cpu() for plane in range(2))
        return SegmentKV((k, v))

    @property
    def caches(self) -> list[torch.Tensor]:
        """Of all layers, (B, H, N, 2 D). After vLLM has slept they are others."""
        return [layer.kv_cache for layer in self._in_order]

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
        """The same; yields the number of each layer when its KV is copied."""
        everything = range(len(self._in_order))
        return self._gather(block_ids, spans, [(everything, rows) for rows in into])

    def gather_layers(
        self, block_ids: Sequence[int], spans: Sequence[Span], into: Sequence[tuple[range, torch.Tensor]]
    ) -> None:
        """The same with only some layers of each span. Shapes:  into (H, len(layers), 2, len(span), D)"""
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
            places.append(list(_by_block(Span(ahead, ahead + len(span)), size)))
            num_before += len(table) * size
        for index, layer in enumerate(self._in_order):
            own = [
                (rows[:, index - layers.start], at)
                for (layers, rows), at in zip(into, places, strict=True)
                if index in layers
            ]
            if not own:
                continue
            copied = layer.kv_cache.index_select(0, blocks)
            for plane, read in enumerate(self._layout.planes):
                rows = read(copied)
                for target, pieces in own:
                    start = 0
                    for blocks_there, inside in pieces:
                        piece = rows[blocks_there, inside].permute(2, 0, 1, 3)
                        end = start + piece.shape[1] * piece.shape[2]
                        target[:, plane, start:end].view(piece.shape)[:] = piece
                        start = end
            yield index

    def table(self, block_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """The kernel blocks of positions [0, num_tokens), on the device."""
        blocks = np.array(self.kernel_blocks(block_ids, Span(0, num_tokens)), np.int64)
        (table,) = to_device(self.kv_layout.device, blocks)
        return table

    def keys(self, layer: int, table: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """K of one layer at positions [0, num_tokens) on the device, (T, H, D); `table` has their blocks."""
        assert self._layout is not None
        cache, read = self._in_order[layer].kv_cache, self._layout.planes[0]
        if self._layout.reads_views:  # V would be copied with K, and K once more
            return read(cache).index_select(0, table).flatten(0, 1)[:num_tokens]
        return read(cache.index_select(0, table)).flatten(0, 1)[:num_tokens]

    def slots_at(self, block_ids: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        """Slots of single positions, (P,) int64 on the device."""
        (slots,) = to_device(
            self.kv_layout.device,
            self.slot_numbers(block_ids, Span(0, max(positions) + 1))[np.array(positions, np.int64)],
        )
        return slots

    def rows(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V in single slots, on the device, (L, P, H, D) each."""
        k, v = self._rows(slots, slice(0, 2)).unbind(1)
        return k, v

    def values(self, slots: torch.Tensor) -> torch.Tensor:
        """The same of V only."""
        return self._rows(slots, slice(1, 2))[:, 0]

    def _rows(self, slots: torch.Tensor, planes: slice) -> torch.Tensor:
        """
        (L, planes, P, H, D), by one gather per layer.

        Element by element: copying the whole blocks of a few rows would move megabytes.
        """
        blocks, inside = slots // self.kernel_block_size, slots % self.kernel_block_size
        (keys, _), num_layers = self.kv_layout.planes, len(self._in_order)
        shape = (num_layers, planes.stop - planes.start, len(slots), keys.num_heads, keys.dim)
        rows = torch.empty(shape, dtype=self.kv_layout.dtype, device=self.kv_layout.device)
        offsets: dict[tuple[int, ...], torch.Tensor] = {}  # by strides, which layers have in common
        for index, layer in enumerate(self._in_order):
            strides = layer.kv_cache.stride()
            if strides not in offsets:
                of_blocks = (blocks * strides[0])[:, None, None]
                offsets[strides] = (of_blocks + self._offsets(strides[1:])[planes, inside]).flatten()
            _take_elements(layer.kv_cache, offsets[strides], rows[index].view(-1))
        return rows

    def _offsets(self, strides: tuple[int, ...]) -> torch.Tensor:
        """Offset in memory of each element of K and V from the first of its block, (2, N, H, D)."""
        if (offsets := self._known_offsets.get(strides)) is not None:
            return offsets
        assert self._layout is not None
        cache = self._in_order[0].kv_cache
        sizes = zip(cache.shape[1:], strides, strict=True)
        h, n, d = (torch.arange(size, device=cache.device) * step for size, step in sizes)
        places = (h[:, None, None] + n[:, None] + d).unsqueeze(0)
        self._known_offsets[strides] = torch.stack([read(places)[0] for read in self._layout.planes])
        return self._known_offsets[strides]


def _by_block(span: Span, size: int) -> Iterator[tuple[slice, slice]]:
    """
    The blocks of a span in order, and the tokens in each. Whole blocks stand together.

    Rows of whole blocks can be copied at once, from where they lie; in one line they would be copied twice.
    """
    start = span.start
    while start < span.end:
        block, token = divmod(start, size)
        num_whole = (span.end - start) // size if token == 0 else 0
        blocks = slice(block, block + max(num_whole, 1))
        end = min(blocks.stop * size, span.end)
        yield blocks, slice(token, end - (blocks.stop - 1) * size)
        start = end


def _take_elements(cache: torch.Tensor, offsets: torch.Tensor, into: torch.Tensor) -> None:
    """Copy elements by their offset in memory, for any strides of the cache. Shapes:  offsets, into (E,)"""
    last = sum((size - 1) * stride for size, stride in zip(cache.shape, cache.stride(), strict=True))
    torch.index_select(cache.as_strided((last + 1,), (1,)), 0, offsets, out=into)
