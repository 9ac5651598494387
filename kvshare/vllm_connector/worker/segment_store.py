"""
Segments in host memory: in an arena that all ranks share, or in an arena for this rank's heads only.

    extent     [part][head][layer][k, v][token][dim]     in the dtype of vLLM's cache
    part       the layers of one shape: most models have a single part

Heads come first, so that each rank's part of a segment is contiguous for any number of ranks.

Alphabet: H kv heads of this rank, L layers, T tokens, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from delta_tree import Segment, SegmentId
from kvshare.kv.arena import Arena, Extent
from kvshare.kv.layout import KVLayout, Plane
from kvshare.vllm_connector.worker.disk_reads import Reads

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import DiskReport, Preloads, WriteRequest  # which imports vLLM

_ALIGNMENT = 64  # bytes, of the start of each part
_SLACK = 8  # the arena is an eighth larger than all segments together, because free memory is fragmented


def arena_bytes(max_bytes: int) -> int:
    """Return the size of an arena for segments of `max_bytes` in all."""
    return max_bytes + max_bytes // _SLACK


@dataclass(slots=True, eq=False)
class Stored:
    """
    A segment, or its layers of one shape: `rows` (H, L, 2, T, D) view the extent.

    `sums` (H, L): the sum of each layer of each head, see `kv/sums.py`; None until the rows are written.
    `others`: the layers of other shapes; set in the first part of a segment only.
    """

    segment_id: SegmentId
    extent: Extent
    rows: torch.Tensor
    sums: NDArray[np.int64] | None = None
    num_users: int = 0  # transfers that read or write the rows
    others: tuple[Stored, ...] = ()
    # The same for as long as it lives, and read for every batch of a load.
    num_heads: int = field(init=False)
    num_layers: int = field(init=False)
    num_tokens: int = field(init=False)
    row_bytes: int = field(init=False)  # of K and V of a token, in one layer of one head
    piece_bytes: int = field(init=False)  # of one layer of one head

    def __post_init__(self) -> None:
        self.num_heads, self.num_layers, _, self.num_tokens, dim = self.rows.shape
        self.row_bytes = 2 * dim * self.rows.itemsize
        self.piece_bytes = self.num_tokens * self.row_bytes

    @property
    def parts(self) -> tuple[Stored, ...]:
        """Return the layers of each shape, in the order of the cache's parts."""
        return (self, *self.others)

    @property
    def is_saved(self) -> bool:
        """Return whether the rows of all layers are written."""
        return all(part.sums is not None for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the layers of all shapes."""
        return sum(part.rows.nbytes for part in self.parts)


class SegmentStore:
    """
    Used by the worker's thread only. The memory of a dropped segment is freed when no transfer uses it any
    more, because copies are made in any order, and several at once.

    Ranks that share an arena make the same calls in the same order, so they need not exchange extents.
    """

    def __init__(
        self, buffer: torch.Tensor, layout: KVLayout, *, num_heads: int | None = None, first_head: int = 0
    ) -> None:
        """
        `num_heads`: the heads of a segment in a buffer that ranks share, of which this rank's begin at
        `first_head`; all layers must have one shape there. None: the buffer belongs to this rank alone.
        """
        self.arena = Arena(buffer)
        self._dtype = layout.dtype
        self._keys = [plane for plane in layout.planes if plane.name == "k"]  # of each part
        if num_heads is not None and len(self._keys) > 1:
            raise ValueError(f"{len(self._keys)} shapes of layers in a buffer that ranks share: expected one")
        self._num_heads, self._first_head = num_heads, first_head
        self._stored: dict[SegmentId, Stored] = {}
        self._leaving: set[Stored] = set()  # dropped, but in use

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._stored

    def ids(self) -> list[SegmentId]:
        return list(self._stored)

    @property
    def has_leaving(self) -> bool:
        """Return whether memory will be free when transfers end."""
        return bool(self._leaving)

    def add(self, segment_id: SegmentId, num_tokens: int) -> Stored:
        """Allocate a segment. Raises MemoryError if there is no contiguous room."""
        shapes = [
            (self._num_heads or keys.num_heads, len(keys.layers), 2, num_tokens, keys.dim)
            for keys in self._keys
        ]
        sizes = [torch.Size(shape).numel() * self._dtype.itemsize for shape in shapes]
        starts = list(accumulate((-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes), initial=0))
        extent = self.arena.allocate(starts[-1])
        if extent is None:
            raise MemoryError(f"no contiguous room for a segment of {num_tokens} tokens")
        rows, *others = (
            self._rows(Extent(extent.start + start, extent.end), shape, keys)
            for start, shape, keys in zip(starts, shapes, self._keys, strict=False)
        )
        of_others = tuple(Stored(segment_id, extent, own) for own in others)
        self._stored[segment_id] = stored = Stored(segment_id, extent, rows, others=of_others)
        return stored

    def _rows(self, extent: Extent, shape: tuple[int, ...], keys: Plane) -> torch.Tensor:
        """Return the rows of this rank."""
        whole = self.arena.view(extent, shape, self._dtype)
        return whole[self._first_head : self._first_head + keys.num_heads]

    def find(self, segment_ids: Iterable[SegmentId]) -> Mapping[SegmentId, Stored]:
        """Return the segments of these ids that are held."""
        return {
            segment_id: self._stored[segment_id] for segment_id in segment_ids if segment_id in self._stored
        }

    def hold(self, segments: Iterable[Stored]) -> None:
        """Protect the memory of segments while a transfer uses it; `release` must follow."""
        for stored in segments:
            stored.num_users += 1

    def release(self, segments: Iterable[Stored]) -> None:
        """End a `hold`, after a transfer has ended on all ranks. Frees memory of dropped segments."""
        for stored in segments:
            stored.num_users -= 1
            if not stored.num_users and stored in self._leaving:
                self._leaving.remove(stored)
                self.arena.free(stored.extent)

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Remove segments everywhere, also below memory; unknown ids are ignored."""
        self.evict(segment_ids)

    def evict(self, segment_ids: Iterable[SegmentId]) -> None:
        """Remove segments from memory, which is freed once no transfer uses it; unknown ids are ignored."""
        for segment_id in segment_ids:
            if (stored := self._stored.pop(segment_id, None)) is None:
                continue
            if stored.num_users:
                self._leaving.add(stored)
            else:
                self.arena.free(stored.extent)

    def write(self, requests: Iterable[WriteRequest]) -> None:
        """Do nothing: there is no disk."""

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Do nothing: there is no store that others write."""

    def reads(self, segment_ids: Iterable[SegmentId], *, within_s: float) -> Reads | None:
        """Return None: nothing is below memory."""
        return None

    def preload(self, preloads: Preloads) -> None:
        """Do nothing: nothing is below memory."""

    def take_disk_report(self) -> DiskReport | None:
        """Return None: nothing is written."""
        return None

    def close(self) -> None:
        """Do nothing: nothing is to be written."""

    def clear(self) -> None:
        """Drop all. No copy may be under way on any rank."""
        self._stored.clear()
        self._leaving.clear()
        self.arena.clear()
