"""
Segments in host memory: in an arena that all ranks share, or in one for this rank's heads only.

    extent     [head][layer][k, v][token][dim]     in the dtype of vLLM's cache

Heads come first, so that each rank's part of a segment is contiguous for any number of ranks.

Alphabet: H kv heads of this rank, L layers, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import SegmentId
from kvshare.kv.arena import Arena, Extent
from kvshare.kv.layout import KVLayout

_SLACK = 8  # the arena is larger than all segments by one part in so many, because free memory is fragmented


def arena_bytes(max_bytes: int) -> int:
    """Size of an arena for segments of `max_bytes` together."""
    return max_bytes + max_bytes // _SLACK


@dataclass(slots=True, eq=False)
class Stored:
    """
    A segment: `rows` (H, L, 2, T, D) view the extent.

    `sums` (H, L): of each layer of each head, see `kv/sums.py`. None until the rows are written.
    """

    segment_id: SegmentId
    extent: Extent
    rows: torch.Tensor
    sums: NDArray[np.int64] | None = None
    num_users: int = 0  # transfers that read or write the rows

    @property
    def num_heads(self) -> int:
        return self.rows.shape[0]

    @property
    def num_layers(self) -> int:
        return self.rows.shape[1]

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[3]

    @property
    def row_bytes(self) -> int:
        """Of K and V of a token, in one layer of one head."""
        return 2 * self.rows.shape[4] * self.rows.itemsize

    @property
    def piece_bytes(self) -> int:
        """Of one layer of one head."""
        return self.num_tokens * self.row_bytes


class SegmentStore:
    """
    Used by the worker's thread only. The memory of a dropped segment is free when no transfer uses it any
    more: copies are made in any order, and several at once.

    Ranks that share an arena make the same calls in the same order, so that they need not exchange extents.
    """

    def __init__(
        self, buffer: torch.Tensor, layout: KVLayout, *, num_heads: int, first_head: int = 0
    ) -> None:
        """Segments have `num_heads` in the buffer. Those of this rank's layout begin at `first_head`."""
        self.arena = Arena(buffer)
        self._layout, self._num_heads, self._first_head = layout, num_heads, first_head
        self._stored: dict[SegmentId, Stored] = {}
        self._leaving: set[Stored] = set()  # dropped, but in use

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._stored

    def ids(self) -> list[SegmentId]:
        return list(self._stored)

    @property
    def has_leaving(self) -> bool:
        """Whether memory will be free when transfers end."""
        return bool(self._leaving)

    def add(self, segment_id: SegmentId, num_tokens: int) -> Stored:
        """Allocate a segment. Raises MemoryError if there is no contiguous room."""
        keys, _ = self._layout.planes
        shape = (self._num_heads, self._layout.num_layers, 2, num_tokens, keys.dim)
        extent = self.arena.allocate(torch.Size(shape).numel() * self._layout.dtype.itemsize)
        if extent is None:
            raise MemoryError(f"no contiguous room for a segment of {num_tokens} tokens")
        whole, first = self.arena.view(extent, shape, self._layout.dtype), self._first_head
        stored = Stored(segment_id, extent, whole[first : first + keys.num_heads])
        self._stored[segment_id] = stored
        return stored

    def find(self, segment_ids: Iterable[SegmentId]) -> Mapping[SegmentId, Stored]:
        """The segments of these ids that are held."""
        return {
            segment_id: self._stored[segment_id] for segment_id in segment_ids if segment_id in self._stored
        }

    def hold(self, segments: Iterable[Stored]) -> None:
        """A transfer begins to use them; `release` must follow."""
        for stored in segments:
            stored.num_users += 1

    def release(self, segments: Iterable[Stored]) -> None:
        """A transfer has ended, on all ranks."""
        for stored in segments:
            stored.num_users -= 1
            if not stored.num_users and stored in self._leaving:
                self._leaving.remove(stored)
                self.arena.free(stored.extent)

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """No load finds them any more; unknown ids are ignored. Free their memory when it may be."""
        for segment_id in segment_ids:
            if (stored := self._stored.pop(segment_id, None)) is None:
                continue
            if stored.num_users:
                self._leaving.add(stored)
            else:
                self.arena.free(stored.extent)

    def clear(self) -> None:
        """Drop all. No copy may be under way on any rank."""
        self._stored.clear()
        self._leaving.clear()
        self.arena.clear()
