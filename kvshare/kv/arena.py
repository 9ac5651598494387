"""
Allocates extents for segments in one buffer of host memory.

It is one buffer, so that it can be registered with a device as a whole and shared by processes.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import torch

_GRAIN = 512  # bytes; extents begin at multiples of it, so that every dtype is aligned


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, end) of an arena."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


class Arena:
    """
    Best fit: the smallest free extent that is large enough is used, so that large ones stay large.

    The same calls in the same order give the same extents, so processes that share a buffer need not exchange
    them. Not thread-safe.
    """

    def __init__(self, buffer: torch.Tensor) -> None:
        """`buffer`: (bytes,) uint8. Pages of `torch.empty` take memory only when they are written."""
        self.buffer = buffer
        self.clear()

    def clear(self) -> None:
        self._by_size: list[tuple[int, int]] = []  # (bytes, start), ascending
        self._by_start: dict[int, int] = {}  # start: end
        self._by_end: dict[int, int] = {}
        self._put(0, len(self.buffer) // _GRAIN * _GRAIN)

    def allocate(self, num_bytes: int) -> Extent | None:
        """Allocate an extent of at least `num_bytes`; None if no free extent is that large."""
        wanted = -(-num_bytes // _GRAIN) * _GRAIN
        index = bisect_left(self._by_size, (wanted, 0))
        if index == len(self._by_size):
            return None
        _, start = self._by_size[index]
        end = self._by_start[start]
        self._take(start)
        self._put(start + wanted, end)
        return Extent(start, start + wanted)

    def free(self, extent: Extent) -> None:
        """Free an allocated extent, and merge it with the free extents next to it."""
        start, end = extent.start, extent.end
        if start in self._by_end:
            start = self._by_end[start]
            self._take(start)
        if end in self._by_start:
            following = self._by_start[end]
            self._take(end)
            end = following
        self._put(start, end)

    def view(self, extent: Extent, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a view of the first bytes of an extent as a tensor, which must fit into it."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.buffer[extent.start : extent.start + num_bytes].view(dtype).view(shape)

    def _put(self, start: int, end: int) -> None:
        if end > start:
            insort(self._by_size, (end - start, start))
            self._by_start[start] = end
            self._by_end[end] = start

    def _take(self, start: int) -> None:
        end = self._by_start.pop(start)
        del self._by_end[end]
        del self._by_size[bisect_left(self._by_size, (end - start, start))]
