"""
This rank's part of all segments: its heads, in an arena on the host.

    extent     [head][layer][k, v][token][dim]     in the dtype of vLLM's cache

Heads come first, so that what one rank has of a segment is one piece, however many ranks there are.

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

_SLACK = 8  # one part in so many more than segments may take: what is free does not lie in one piece


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

    def __init__(self, max_bytes: int, layout: KVLayout) -> None:
        self.arena = Arena(max_bytes + max_bytes // _SLACK)
        self._layout = layout
        self._stored: dict[SegmentId, Stored] = {}

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._stored

    def ids(self) -> list[SegmentId]:
        return list(self._stored)

    def add(self, segment_id: SegmentId, num_tokens: int) -> Stored:
        """Room for a segment. Raises MemoryError if there is none in one piece."""
        keys, _ = self._layout.planes
        shape = (keys.num_heads, self._layout.num_layers, 2, num_tokens, keys.dim)
        extent = self.arena.allocate(torch.Size(shape).numel() * self._layout.dtype.itemsize)
        if extent is None:
            raise MemoryError(f"no room in one piece for a segment of {num_tokens} tokens")
        stored = Stored(extent, self.arena.view(extent, shape, self._layout.dtype))
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
