"""
Which k-grams of tokens have been seen, and where: millions of them, in sorted arrays.

Levels of doubling size, as in a log-structured store: adding is cheap, looking up many at once is a binary
search per level. 12 bytes a k-gram, where a dictionary takes 150.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]
Positions = NDArray[np.int64]

_FIRST_LEVEL = 4096


@dataclass(slots=True)
class _Level:
    hashes: Hashes  # ascending
    positions: NDArray[np.uint32]


class GramTable:
    """Hash -> position; each hash once. Positions are below 2**32."""

    def __init__(self) -> None:
        self._levels: list[_Level] = []  # largest first

    def find(self, hashes: Hashes) -> Positions:
        """Where each hash was last put, -1 for unknown ones. Shapes: (N,) -> (N,)."""
        found = np.full(len(hashes), -1, dtype=np.int64)
        for level in self._levels:
            places, is_known = _locate(level, hashes)
            found[is_known] = level.positions[places[is_known]]
        return found

    def put(self, hashes: Hashes, positions: Positions) -> None:
        """Set the positions of hashes, known or not; of equal hashes the last one counts."""
        keep = _last_of_each(hashes)
        hashes, positions = hashes[keep], positions[keep]
        is_new = np.ones(len(hashes), dtype=np.bool_)
        for level in self._levels:
            places, is_known = _locate(level, hashes)
            level.positions[places[is_known]] = positions[is_known]
            is_new &= ~is_known
        if is_new.any():
            self._levels.append(_sorted_level(hashes[is_new], positions[is_new].astype(np.uint32)))
            self._compact()

    def _compact(self) -> None:
        """Merge the last levels while the smaller is not much smaller than the one before it."""
        levels = self._levels
        while len(levels) > 1 and (
            len(levels[-1].hashes) * 2 > len(levels[-2].hashes) or len(levels[-2].hashes) < _FIRST_LEVEL
        ):
            small, large = levels.pop(), levels.pop()
            levels.append(
                _sorted_level(
                    np.concatenate((large.hashes, small.hashes)),
                    np.concatenate((large.positions, small.positions)),
                )
            )


def _locate(level: _Level, hashes: Hashes) -> tuple[Positions, NDArray[np.bool_]]:
    places = np.minimum(np.searchsorted(level.hashes, hashes), len(level.hashes) - 1)
    return places, level.hashes[places] == hashes


def _last_of_each(hashes: Hashes) -> Positions:
    """Indices of the last occurrence of each value, ascending by value."""
    _, from_end = np.unique(hashes[::-1], return_index=True)
    indices: Positions = len(hashes) - 1 - from_end
    return indices


def _sorted_level(hashes: Hashes, positions: NDArray[np.uint32]) -> _Level:
    order = np.argsort(hashes, kind="stable")  # radix or timsort: quick on runs that are sorted already
    return _Level(hashes[order], positions[order])
