"""
Segments in host memory, in an arena that all ranks share, or in one of this rank's heads alone.

    extent     [head][layer][k, v][token][dim]     in the dtype of vLLM's cache

Heads come first, so that what one rank has of a segment is one piece, however many ranks there are.

Alphabet: H kv heads of this rank, L layers, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
import xxhash

from delta_tree import SegmentId
from kvshare.kv.arena import Arena, Extent
from kvshare.kv.layout import KVLayout

_SLACK = 8  # one part in so many more than segments may take: what is free does not lie in one piece


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """A buffer for segments of so many heads, of which this rank's are those from `first_head` on."""

    buffer: torch.Tensor
    num_heads: int
    first_head: int = 0

    @classmethod
    def of_this_rank(cls, max_bytes: int, num_heads: int) -> Self:
        """For its heads alone. Of what is never written nothing is taken from the system."""
        return cls(torch.empty(arena_bytes(max_bytes), dtype=torch.uint8), num_heads)


def arena_bytes(max_bytes: int) -> int:
    """How large an arena is for segments of so many bytes."""
    return max_bytes + max_bytes // _SLACK


@dataclass(slots=True, eq=False)
class Stored:
    """`rows` (H, L, 2, T, D) lie in the extent. The checksum is known once they are written."""

    extent: Extent
    rows: torch.Tensor
    checksum: int = 0

    def computed_checksum(self) -> int:
        """xxh3 of the rows: against accidental corruption only."""
        return xxhash.xxh3_64_intdigest(self.rows.flatten().view(torch.uint8).numpy().data)

    @property
    def is_whole(self) -> bool:
        return self.computed_checksum() == self.checksum


class SegmentStore:
    """
    Used by the worker's thread alone. Whoever copies from or to an extent does so in the order of the calls
    here: one that is dropped may be given to the next segment at once.
    """

    def __init__(self, memory: Memory, layout: KVLayout) -> None:
        self.arena = Arena(memory.buffer)
        self._memory = memory
        self._layout = layout
        self._stored: dict[SegmentId, Stored] = {}

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._stored

    def ids(self) -> list[SegmentId]:
        return list(self._stored)

    def add(self, segment_id: SegmentId, num_tokens: int) -> Stored:
        """Room for a segment. Raises MemoryError if there is none in one piece."""
        keys, _ = self._layout.planes
        shape = (self._memory.num_heads, self._layout.num_layers, 2, num_tokens, keys.dim)
        extent = self.arena.allocate(torch.Size(shape).numel() * self._layout.dtype.itemsize)
        if extent is None:
            raise MemoryError(f"no room in one piece for a segment of {num_tokens} tokens")
        whole, first = self.arena.view(extent, shape, self._layout.dtype), self._memory.first_head
        stored = Stored(extent, whole[first : first + keys.num_heads])
        self._stored[segment_id] = stored
        return stored

    def find(self, segment_ids: Iterable[SegmentId]) -> Mapping[SegmentId, Stored]:
        """Those that are here."""
        return {entry: self._stored[entry] for entry in segment_ids if entry in self._stored}

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Those that are not here are ignored."""
        for segment_id in segment_ids:
            if (stored := self._stored.pop(segment_id, None)) is not None:
                self.arena.free(stored.extent)

    def clear(self) -> None:
        self._stored.clear()
        self.arena.clear()
