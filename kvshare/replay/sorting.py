"""
Sorting more fixed-size records than memory should hold: sorted runs on disk, merged as they are read.

Records are bytes and sort as such; whoever packs them sees to it that the order means something.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from pathlib import Path

_CHUNK_RECORDS = 4096


class ExternalSort:
    """Takes records of `size` bytes and gives them back in order; its files lie in the caller's folder."""

    def __init__(self, folder: Path, name: str, *, size: int, max_records: int = 500_000) -> None:
        self._folder = folder
        self._name = name
        self._size = size
        self._max_records = max_records
        self._records: list[bytes] = []
        self._runs: list[Path] = []

    def add(self, record: bytes) -> None:
        """One record."""
        assert len(record) == self._size
        self._records.append(record)
        if len(self._records) >= self._max_records:
            self._spill()

    def __iter__(self) -> Iterator[bytes]:
        """All records in order; may be asked for again, not while records are added."""
        if not self._runs:
            self._records.sort()
            return iter(self._records)
        self._spill()
        return heapq.merge(*(self._read(run) for run in self._runs))

    def discard(self) -> None:
        """Delete the runs."""
        for run in self._runs:
            run.unlink()
        self._runs, self._records = [], []

    def _spill(self) -> None:
        if not self._records:
            return
        run = self._folder / f"{self._name}-{len(self._runs)}"
        self._records.sort()
        write_records(run, self._records)
        self._runs.append(run)
        self._records = []

    def _read(self, run: Path) -> Iterator[bytes]:
        return read_records(run, self._size)


def write_records(path: Path, records: Iterable[bytes]) -> int:
    """Returns how many."""
    number = 0
    with path.open("wb", buffering=1 << 20) as file:
        for record in records:
            file.write(record)
            number += 1
    return number


def read_records(path: Path, size: int, *, start: int = 0) -> Iterator[bytes]:
    """From record `start` on."""
    with path.open("rb", buffering=0) as file:
        file.seek(start * size)
        while chunk := file.read(size * _CHUNK_RECORDS):
            for position in range(0, len(chunk), size):
                yield chunk[position : position + size]
