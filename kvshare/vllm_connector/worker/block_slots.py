"""
Where the positions of a request lie in vLLM's paged cache, by its block table.

    position   0 .. N-1      N .. 2N-1     2N ..        N = block_size
    block      block_ids[0]  block_ids[1]  block_ids[2]
    slot       block id * N + position % N

The blocks are those of the scheduler. Kernels may use smaller ones: then each block consists of several.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.kv.to_device import to_device


class BlockSlots:
    """The slots of blocks of one size. Results on "the device" are copied there."""

    def __init__(self, block_size: int, *, kernel_block_size: int, device: torch.device) -> None:
        self.block_size, self.kernel_block_size = block_size, kernel_block_size
        self._device = device

    def kernel_blocks(self, block_ids: Sequence[int], span: Span) -> list[int]:
        """Return the numbers of a span's kernel blocks."""
        ratio = self.block_size // self.kernel_block_size
        blocks = self._blocks_of(block_ids, span)
        return [block_id * ratio + part for block_id in blocks for part in range(ratio)]

    def _blocks_of(self, block_ids: Sequence[int], span: Span) -> Sequence[int]:
        """Return only a span's blocks: a long prompt has hundreds of spans and thousands of blocks."""
        return block_ids[span.start // self.block_size : -(-span.end // self.block_size)]

    def slots(self, block_ids: Sequence[int], span: Span) -> torch.Tensor:
        """Return the slots of the positions in `span`, (len(span),) int64 on the device."""
        (slots,) = to_device(self._device, self.slot_numbers(block_ids, span))
        return slots

    def slot_numbers(self, block_ids: Sequence[int], span: Span) -> NDArray[np.int64]:
        """Return the same as `slots`, as an array on the host."""
        first = span.start // self.block_size
        positions = np.arange(span.start, span.end)
        table = np.array(self._blocks_of(block_ids, span), np.int64)
        slots: NDArray[np.int64] = table[positions // self.block_size - first] * self.block_size
        return slots + positions % self.block_size

    def table(self, block_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Return the kernel blocks of positions [0, num_tokens), on the device."""
        blocks = np.array(self.kernel_blocks(block_ids, Span(0, num_tokens)), np.int64)
        (table,) = to_device(self._device, blocks)
        return table
