"""
Segments in staging buffers: cut into layers, so that a segment may be larger than a buffer.

    segment     [head][layer][k, v][token][dim]        H heads, L layers, T tokens
    in staging  [head][some layers][k, v][token][dim]  the layers [first, end) of each head
    piece       one layer of one head; each piece has a sum

All heads of a layer are in the same batch, so that vLLM's own kernels can write it, too. In a load of several
batches, each batch has the same layers of all segments, so that the first layers arrive first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Span
from kvshare.vllm_connector.worker.kernel_tables import StagedCopy, StagedPart
from kvshare.vllm_connector.worker.segment_store import Stored

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.paged_cache import PagedCache

_GRAIN = 512  # bytes; segments begin at multiples of it
_GROUPS = 12  # groups of layers in a large load: with more, copies are shorter; with fewer, the first is late


@dataclass(frozen=True, slots=True, eq=False)
class StagedLayers:
    """Layers of a segment in a staging buffer. Units:  offset in bytes from the start of the buffer"""

    stored: Stored
    layers: range
    offset: int = 0

    @property
    def is_whole(self) -> bool:
        return len(self.layers) == self.stored.num_layers

    @property
    def num_bytes(self) -> int:
        """Return the bytes in staging."""
        return self.stored.num_heads * len(self.layers) * self.stored.piece_bytes

    @property
    def rows(self) -> list[torch.Tensor]:
        """Return the rows in host memory, in as few tensors as possible. Staging has them in this order."""
        if self.is_whole:
            return [self.stored.rows]
        return list(self.stored.rows[:, self.layers.start : self.layers.stop].unbind())

    @property
    def part(self) -> StagedPart:
        """Return the description of these layers in staging for our kernels."""
        num_layers = len(self.layers)
        num_pieces = self.stored.num_heads * num_layers
        return StagedPart(self.offset, self.stored.num_tokens, self.layers.start, num_pieces, num_layers)

    def sums(self) -> NDArray[np.int64]:
        """Return the stored sums of these pieces, head by head."""
        assert self.stored.sums is not None, "its save has ended"
        return self.stored.sums[:, self.layers.start : self.layers.stop].ravel()

    def store_sums(self, found: NDArray[np.int64]) -> None:
        """Store the computed sums of these pieces, in the order of `sums`."""
        if self.stored.sums is None:
            self.stored.sums = np.zeros((self.stored.num_heads, self.stored.num_layers), np.int64)
        own = found.reshape(self.stored.num_heads, len(self.layers))
        self.stored.sums[:, self.layers.start : self.layers.stop] = own

    def view(self, staging: torch.Tensor) -> torch.Tensor:
        """Return the view of these rows in staging, (H, len(layers), 2, T, D)."""
        rows = self.stored.rows
        own = staging[self.offset : self.offset + self.num_bytes]
        return own.view(rows.dtype).view(rows.shape[0], len(self.layers), *rows.shape[2:])


def saved(
    batch: Iterable[tuple[StagedLayers, Span]], cache: PagedCache, block_ids: Sequence[int]
) -> list[StagedCopy]:
    """Return the copies by which a kernel gathers spans of a request from vLLM's caches."""
    return [
        StagedCopy(layers.part, Span(0, len(span)), cache.slot_numbers(block_ids, span))
        for layers, span in batch
    ]


def batches(segments: Sequence[Stored], max_bytes: int) -> Iterator[list[StagedLayers]]:
    """
    Yield batches of layers that fit a staging buffer, in the order of segments.

    Raises ValueError if one layer of a segment is larger than the buffer.
    """
    batch: list[StagedLayers] = []
    used = 0
    for stored in segments:
        start = 0
        while start < stored.num_layers:
            room = _num_fitting(stored, max_bytes - used)
            layers = range(start, min(start + room, stored.num_layers))
            if layers:
                staged = StagedLayers(stored, layers, used)
                batch.append(staged)
                used += _aligned(staged.num_bytes, _GRAIN)
                start = layers.stop
            elif batch:
                yield batch
                batch, used = [], 0
            else:
                raise ValueError(_too_large(stored, max_bytes))
    if batch:
        yield batch


def batches_by_layer(segments: Sequence[Stored], max_bytes: int) -> list[list[StagedLayers]]:
    """
    Return batches in the order of layers: the first layers of all segments, then the next layers. If
    everything fits a buffer, there is one batch. A batch has a segment at most once.
    """
    total = sum(_aligned(stored.rows.nbytes, _GRAIN) for stored in segments)
    if total <= max_bytes:
        return list(batches(segments, max_bytes))
    num_layers = segments[0].num_layers
    at_once = -(-num_layers // min(_GROUPS, -(-total // max_bytes)))
    found: list[list[StagedLayers]] = [[]]
    used, last = 0, dict[Stored, int]()  # the number of the last batch that has a segment
    for first in range(0, num_layers, at_once):
        for stored in segments:
            for layers in _cut(stored, range(first, min(first + at_once, num_layers)), max_bytes):
                staged = StagedLayers(stored, layers, used)
                if last.get(stored) == len(found) - 1 or used + staged.num_bytes > max_bytes:
                    found.append([])
                    staged, used = StagedLayers(stored, layers), 0
                found[-1].append(staged)
                last[stored] = len(found) - 1
                used += _aligned(staged.num_bytes, _GRAIN)
    return [batch for batch in found if batch]


def _cut(stored: Stored, layers: range, max_bytes: int) -> Iterator[range]:
    """Cut layers of a segment into ranges that fit a buffer. Raises ValueError if a single one does not."""
    size = _num_fitting(stored, max_bytes)
    if not size:
        raise ValueError(_too_large(stored, max_bytes))
    for start in range(layers.start, layers.stop, size):
        yield range(start, min(start + size, layers.stop))


def _num_fitting(stored: Stored, room: int) -> int:
    """Return how many layers of a segment fit."""
    return max(0, room) // (stored.num_heads * stored.piece_bytes)


def _too_large(stored: Stored, max_bytes: int) -> str:
    return f"one layer of a segment has {StagedLayers(stored, range(1)).num_bytes} bytes, staging {max_bytes}"


def _aligned(num_bytes: int, grain: int) -> int:
    return -(-num_bytes // grain) * grain
