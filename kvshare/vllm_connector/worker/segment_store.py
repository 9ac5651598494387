"""
Segments in host memory: in an arena that all ranks share, or in one for this rank's heads only.

    extent     [head][layer][k, v][token][dim]     in the dtype of vLLM's cache

Heads come first, so that each rank's part of a segment is contiguous for any number of ranks.

Alphabet: H kv heads of this rank, L layers, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash

from delta_tree import SegmentId
from kvshare.kv.arena import Arena, Extent
from kvshare.kv.layout import KVLayout

_SLACK = 8  # the arena is larger than all segments by one part in so many, because free memory is fragmented


def arena_bytes(max_bytes: int) -> int:
    """Size of an arena for segments of `max_bytes` together."""
    return max_bytes + max_bytes // _SLACK


@dataclass(slots=True, eq=False)
class Stored:
    """A segment: `rows` (H, L, 2, T, D) view the extent. The checksum is set when they are written."""

    extent: Extent
    rows: torch.Tensor
    checksum: int = 0

    def computed_checksum(self) -> int:
        """xxh3 of the rows; detects accidental corruption only."""
        return xxhash.xxh3_64_intdigest(self.rows.flatten().view(torch.uint8).numpy().data)

    @property
    def is_whole(self) -> bool:
        return self.computed_checksum() == self.checksum


class SegmentStore:
    """
    Used by the worker's thread only. Copies from and to extents must run in the order of the calls here,
    because the extent of a freed segment may be given to the next one at once.
    """

    def __init__(
        self, buffer: torch.Tensor, layout: KVLayout, *, num_heads: int, first_head: int = 0
    ) -> None:
        """Segments have `num_heads` in the buffer. Those of this rank's layout begin at `first_head`."""
        self.arena = Arena(buffer)
        self._layout, self._num_heads, self._first_head = layout, num_heads, first_head
        self._stored: dict[SegmentId, Stored] = {}

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._stored

    def ids(self) -> list[SegmentId]:
        return list(self._stored)

    def add(self, segment_id: SegmentId, num_tokens: int) -> Stored:
        """Allocate a segment. Raises MemoryError if there is no contiguous room."""
        keys, _ = self._layout.planes
        shape = (self._num_heads, self._layout.num_layers, 2, num_tokens, keys.dim)
        extent = self.arena.allocate(torch.Size(shape).numel() * self._layout.dtype.itemsize)
        if extent is None:
            raise MemoryError(f"no contiguous room for a segment of {num_tokens} tokens")
        whole, first = self.arena.view(extent, shape, self._layout.dtype), self._first_head
        stored = Stored(extent, whole[first : first + keys.num_heads])
        self._stored[segment_id] = stored
        return stored

    def find(self, segment_ids: Iterable[SegmentId]) -> Mapping[SegmentId, Stored]:
        """The segments of these ids that are held."""
        return {
            segment_id: self._stored[segment_id] for segment_id in segment_ids if segment_id in self._stored
        }

    def take(self, segment_ids: Iterable[SegmentId]) -> list[Stored]:
        """Forget segments; ids that are not held are ignored. Their memory stays until it is freed."""
        taken = (self._stored.pop(segment_id, None) for segment_id in segment_ids)
        return [stored for stored in taken if stored is not None]

    def free(self, segments: Iterable[Stored]) -> None:
        """Segments that were taken."""
        for stored in segments:
            self.arena.free(stored.extent)

    def clear(self) -> None:
        self._stored.clear()
        self.arena.clear()
