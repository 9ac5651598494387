"""
Segments in staging buffers: cut into layers, so that a segment may be larger than a buffer.

    segment     [head][layer][k, v][token][dim]        H heads, L layers, T tokens
    in staging  [head][some layers][k, v][token][dim]  the layers [first, end) of each head, heads one after
                                                       the other, from multiples of 16 bytes on
    piece       one layer of one head: what has a sum

All heads of a layer are in the same batch, so that vLLM's own kernels can write it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.vllm_connector.worker.kernel_tables import ALIGNMENT, StagedCopy, StagedPart
from kvshare.vllm_connector.worker.segment_store import Stored

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.copy_writer import RowCopy
    from kvshare.vllm_connector.worker.paged_cache import PagedCache

_GRAIN = 512  # bytes; segments begin at multiples of it


@dataclass(frozen=True, slots=True, eq=False)
class StagedLayers:
    """Layers of a segment in a staging buffer. Units:  offset in bytes from the begin of the buffer"""

    stored: Stored
    layers: range
    offset: int = 0

    @property
    def is_whole(self) -> bool:
        return len(self.layers) == self.stored.num_layers

    @property
    def head_bytes(self) -> int:
        """From one head's layers to the next one's."""
        num_bytes = len(self.layers) * self.stored.piece_bytes
        return num_bytes if self.is_whole else _aligned(num_bytes, ALIGNMENT)

    @property
    def num_bytes(self) -> int:
        """In staging."""
        return self.stored.num_heads * self.head_bytes

    @property
    def rows(self) -> list[torch.Tensor]:
        """Where they are stored: as few contiguous tensors as possible, one for each of `parts`."""
        if self.is_whole:
            return [self.stored.rows]
        return list(self.stored.rows[:, self.layers.start : self.layers.stop].unbind())

    @property
    def parts(self) -> list[StagedPart]:
        """The same in staging."""
        num_tokens, num_layers = self.stored.num_tokens, self.stored.num_layers
        if self.is_whole:
            return [StagedPart(self.offset, num_tokens, 0, self.stored.num_heads * num_layers)]
        return [
            StagedPart(
                self.offset + head * self.head_bytes,
                num_tokens,
                head * num_layers + self.layers.start,
                len(self.layers),
            )
            for head in range(self.stored.num_heads)
        ]

    def copies(self, source: Span, slots: NDArray[np.int64], shift: int = 0) -> list[StagedCopy]:
        """A copy of rows, for each of `parts`."""
        return [StagedCopy(part, source, slots, shift) for part in self.parts]

    def sums(self) -> NDArray[np.int64]:
        """The stored sums of its pieces, in the order of `parts`."""
        assert self.stored.sums is not None, "its save has ended"
        return self.stored.sums[:, self.layers.start : self.layers.stop].ravel()

    def store_sums(self, found: NDArray[np.int64]) -> None:
        """The sums of its pieces, which were just made, in the same order."""
        if self.stored.sums is None:
            self.stored.sums = np.zeros((self.stored.num_heads, self.stored.num_layers), np.int64)
        own = found.reshape(self.stored.num_heads, len(self.layers))
        self.stored.sums[:, self.layers.start : self.layers.stop] = own

    def view(self, staging: torch.Tensor) -> torch.Tensor:
        """Its rows in staging, (H, len(layers), 2, T, D), with a stride of heads."""
        rows = self.stored.rows
        there = staging[self.offset : self.offset + self.num_bytes].view(rows.shape[0], self.head_bytes)
        own = there[:, : len(self.layers) * self.stored.piece_bytes]
        return own.view(rows.dtype).view(rows.shape[0], len(self.layers), *rows.shape[2:])


def loaded(copies: Iterable[tuple[StagedLayers, RowCopy]]) -> list[StagedCopy]:
    """What a kernel writes into vLLM's caches for these copies."""
    return [each for part, copy in copies for each in part.copies(copy.source, copy.slots, copy.shift)]


def saved(
    batch: Iterable[tuple[StagedLayers, Span]], cache: PagedCache, block_ids: Sequence[int]
) -> list[StagedCopy]:
    """What a kernel reads from vLLM's caches for spans of a request."""
    return [
        each
        for part, span in batch
        for each in part.copies(Span(0, len(span)), cache.slot_numbers(block_ids, span))
    ]


def batches(segments: Sequence[Stored], max_bytes: int) -> Iterator[list[StagedLayers]]:
    """
    Layers of segments that fit a staging buffer together, in the order of segments.

    Raises ValueError if one layer of a segment is larger than the buffer.
    """
    batch: list[StagedLayers] = []
    used = 0
    for stored in segments:
        start = 0
        while start < stored.num_layers:
            layers = range(start, start + _num_fitting(stored, start, max_bytes - used))
            if layers:
                staged = StagedLayers(stored, layers, used)
                batch.append(staged)
                used += _aligned(staged.num_bytes, _GRAIN)
                start = layers.stop
            elif batch:
                yield batch
                batch, used = [], 0
            else:
                size = StagedLayers(stored, range(1)).num_bytes
                raise ValueError(f"one layer of a segment has {size} bytes, staging {max_bytes}")
    if batch:
        yield batch


def _num_fitting(stored: Stored, start: int, room: int) -> int:
    """How many layers of a segment from `start` on fit."""
    if start == 0 and stored.rows.nbytes <= room:
        return stored.num_layers
    of_head = max(0, room) // stored.num_heads // ALIGNMENT * ALIGNMENT
    # Not all of them: those of all heads would have no space between heads.
    return min(stored.num_layers - max(start, 1), of_head // stored.piece_bytes)


def _aligned(num_bytes: int, grain: int) -> int:
    return -(-num_bytes // grain) * grain
