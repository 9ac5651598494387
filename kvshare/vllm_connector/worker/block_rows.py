"""Copies rows from blocks of vLLM's cache to other blocks, with torch and vLLM's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
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
    """Read the rows of all layers, then write them with vLLM's own kernels, layer by layer."""
    keys, _ = cache.kv_layout.planes
    layers = range(cache.kv_layout.num_layers)
    block_ids: list[int] = []
    spans, rows = [], []
    for copy in copies:
        ahead = len(block_ids) * cache.block_size
        spans.append(Span(copy.source.start + ahead, copy.source.end + ahead))
        block_ids += copy.block_ids
        shape = (keys.num_heads, len(layers), 2, len(copy.source), keys.dim)
        rows.append(torch.empty(shape, dtype=cache.kv_layout.dtype, device=cache.kv_layout.device))
    cache.gather(block_ids, spans, rows)
    read = [replace(copy, source=Span(0, len(copy.source))) for copy in copies]
    write_layers(cache, [LayerRows(own, layers, copy) for own, copy in zip(rows, read, strict=True)])


def slot_table(cache: PagedCache, copies: Sequence[BlockCopy]) -> SlotTable:
    """Make the table that the kernel of `block_kernels.py` reads."""
    return SlotTable.of(
        [(cache.slot_numbers(copy.block_ids, copy.source), copy.slots, copy.shift) for copy in copies]
    )
