"""Copies rows from blocks of vLLM's cache to other blocks, with torch and vLLM's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.to_device import to_device
from kvshare.vllm_connector.worker.cache_dtype import INTEGERS
from kvshare.vllm_connector.worker.copy_writer import LayerRows, write_layers
from kvshare.vllm_connector.worker.kernel_tables import SlotTable
from kvshare.vllm_connector.worker.paged_cache import PagedCache


@dataclass(frozen=True, slots=True, eq=False)
class BlockCopy:
    """
    Rows in blocks of the cache, the slots to which they are copied, and by how many positions they move.

    Shapes:  slots (len(source),); no copy of the same load reads one of these
    Units:   source in tokens from the start of the first block; shift in tokens, may be negative
    """

    block_ids: tuple[int, ...]
    source: Span
    shift: int
    slots: NDArray[np.int64]


def copy_by_torch(cache: PagedCache, copies: Sequence[BlockCopy]) -> None:
    """
    Copy whole blocks as they are where nothing moves; elsewhere read rows, and write them by vLLM's kernel.

    A near-duplicate with edits of equal length is nearly all whole blocks. In the layouts of CPU kernels,
    reading and writing their rows takes several times as long.
    """
    parts = [_whole_blocks(cache, copy) for copy in copies]
    sources, targets = (np.concatenate([part[number] for part in parts]) for number in (0, 1))
    if len(sources):
        _copy_blocks(cache, sources, targets)
    if rest := [copy for part in parts for copy in part[2]]:
        _copy_rows(cache, rest)


def _whole_blocks(
    cache: PagedCache, copy: BlockCopy
) -> tuple[NDArray[np.int64], NDArray[np.int64], Sequence[BlockCopy]]:
    """Return the kernel blocks that can be copied as they are, from and to, and the copies that remain."""
    size, source = cache.kernel_block_size, copy.source
    start, end = -(-source.start // size) * size, source.end // size * size
    targets = copy.slots[start - source.start : end - source.start : size]
    if copy.shift or end <= start or (targets % size).any():
        return np.empty(0, np.int64), np.empty(0, np.int64), (copy,)
    sources = cache.slot_numbers(copy.block_ids, Span(start, end))[::size]
    edges = (span for span in (Span(source.start, start), Span(end, source.end)) if span)
    rest = [
        replace(copy, source=edge, slots=copy.slots[edge.start - source.start : edge.end - source.start])
        for edge in edges
    ]
    return sources // size, targets // size, rest


def _copy_blocks(cache: PagedCache, sources: NDArray[np.int64], targets: NDArray[np.int64]) -> None:
    if cache.kv_layout.device.type == "cpu":  # straight from block to block, neighbours at once
        starts = np.flatnonzero((np.diff(sources, prepend=-2) != 1) | (np.diff(targets, prepend=-2) != 1))
        lengths = np.diff(starts, append=len(sources)).tolist()
        runs = list(zip(sources[starts].tolist(), targets[starts].tolist(), lengths, strict=True))
        for layer in cache.caches:
            for source, target, length in runs:
                layer[target : target + length].copy_(layer[source : source + length])
        return
    from_blocks, to_blocks = to_device(cache.kv_layout.device, sources, targets)
    for layer in cache.caches:
        bits = layer.view(INTEGERS[layer.itemsize])  # torch cannot index all dtypes of 8 bits
        bits.index_copy_(0, to_blocks, bits.index_select(0, from_blocks))


def _copy_rows(cache: PagedCache, copies: Sequence[BlockCopy]) -> None:
    """Copy layer after layer: the rows of each pass through the same memory, which stays in a CPU's cache."""
    keys, _ = cache.kv_layout.planes
    layers = range(cache.kv_layout.num_layers)
    block_ids: list[int] = []
    spans, rows = [], []
    for copy in copies:
        ahead = len(block_ids) * cache.block_size
        spans.append(Span(copy.source.start + ahead, copy.source.end + ahead))
        block_ids += copy.block_ids
        shape = (keys.num_heads, 1, 2, len(copy.source), keys.dim)
        of_layer = torch.empty(shape, dtype=cache.kv_layout.dtype, device=cache.kv_layout.device)
        rows.append(of_layer.expand(-1, len(layers), -1, -1, -1))
    gathered = cache.gather_by_layer(block_ids, spans, rows)
    read = [replace(copy, source=Span(0, len(copy.source))) for copy in copies]
    write_layers(
        cache,
        [LayerRows(own, layers, copy) for own, copy in zip(rows, read, strict=True)],
        before_layer=lambda _: next(gathered, None),
    )


def slot_table(cache: PagedCache, copies: Sequence[BlockCopy]) -> SlotTable:
    """Make the table that the kernel of `block_kernels.py` reads."""
    return SlotTable.of(
        [(cache.slot_numbers(copy.block_ids, copy.source), copy.slots, copy.shift) for copy in copies]
    )
