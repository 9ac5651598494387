"""
What a stream keeps on disk: the rows, each written once, and records of fixed size that are put in order.

The rows are the log's text. They lie in a folder that only its owner may read, and go with it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from kvshare.replay.readers import LoggedRow, Turn
from kvshare.replay.requests import LoggedRequest

_NAMES = tuple(field.name for field in fields(LoggedRequest))
_CHUNK_RECORDS = 4096
_TUPLES = frozenset({"messages", "token_ids", "block_hashes"})


class Spill:
    """Rows by the offset that `write` returned; the last few are kept parsed, up to a number of bytes."""

    def __init__(self, path: Path, *, max_cached_bytes: int = 64 << 20) -> None:
        self._file = path.open("wb", buffering=1 << 20)
        self._reader = path.open("rb", buffering=1 << 14)  # jumps about: a large buffer would be read in vain
        self._unflushed = False
        self._end = 0
        self._max_cached_bytes = max_cached_bytes
        self._cached_bytes = 0
        self._cache: OrderedDict[int, tuple[int, LoggedRow]] = OrderedDict()

    def write(self, row: LoggedRow) -> int:
        """Append; returns where."""
        line = _encode(row)
        self._file.write(line)
        self._unflushed = True
        offset, self._end = self._end, self._end + len(line)
        return offset

    def read(self, offset: int) -> LoggedRow:
        """The row that was written there."""
        if (cached := self._cache.get(offset)) is not None:
            self._cache.move_to_end(offset)
            return cached[1]
        if self._unflushed:
            self._file.flush()
            self._unflushed = False
        self._reader.seek(offset)
        line = self._reader.readline()
        row = _decode(line)
        self._cache[offset] = (len(line), row)
        self._cached_bytes += len(line)
        while self._cached_bytes > self._max_cached_bytes and len(self._cache) > 1:
            _, (num_bytes, _) = self._cache.popitem(last=False)
            self._cached_bytes -= num_bytes
        return row

    def close(self) -> None:
        self._reader.close()
        self._file.close()


def _encode(row: LoggedRow) -> bytes:
    request = row.request
    values = {name: getattr(request, name) for name in _NAMES}
    values["turns"] = [(turn.num_messages, turn.time_s) for turn in row.turns]
    values["turn_by_order"] = row.turn_by_order or None
    given = {name: value for name, value in values.items() if value is not None and value != []}
    return json.dumps(given, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> LoggedRow:
    values: dict[str, Any] = json.loads(line)
    turns = tuple(Turn(num_messages, time_s) for num_messages, time_s in values.pop("turns", ()))
    turn_by_order = values.pop("turn_by_order", False)
    for name in _TUPLES & values.keys():
        values[name] = tuple(values[name])
    return LoggedRow(LoggedRequest(**values), turns, turn_by_order)


def write_records(path: Path, records: Iterable[bytes]) -> int:
    """Returns how many."""
    number = 0
    with path.open("wb", buffering=1 << 20) as file:
        for record in records:
            file.write(record)
            number += 1
    return number


def sort_records(path: Path, size: int) -> None:
    """As bytes, in place: memory holds as much of the file as the system has room for."""
    if path.stat().st_size:
        np.memmap(path, dtype=f"V{size}", mode="r+").sort()


def read_records(path: Path, size: int) -> Iterator[bytes]:
    """In the file's order."""
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(size * _CHUNK_RECORDS):
            for position in range(0, len(chunk), size):
                yield chunk[position : position + size]
