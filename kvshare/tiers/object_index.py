"""
The segments of a folder's objects, in one file: a start reads it instead of 100,000 headers.

    16 bytes   check of the rest (xxh3)
    a line     JSON: the format, and the namespaces, to which rows refer by number
    rows       uint64: see `_COLUMNS`

The index only repeats what the objects' headers say, and a header is compared with it when its object is
read. The header of a file without a row is read; a row without a file is ignored. So an old index only costs
time.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from delta_tree import Segment, SegmentId
from kvshare.tiers.files import Files

INDEX_FILE: Final = "index"
FORMAT: Final = "kvshare index 1"
_UNFINISHED: Final = "index.tmp"
_COLUMNS: Final = 7  # id, namespace, first position, tokens, generation, bytes, checksum
_CHECK_BYTES: Final = 16
_CHUNK: Final = 1 << 20


def write_index(files: Files, folder: Path, segments: Collection[Segment]) -> None:
    """Replace the index of a folder. Raises OSError; then the earlier index is still there."""
    numbers: dict[str, int] = {}
    rows = np.array(
        [
            (
                segment.segment_id,
                numbers.setdefault(segment.namespace, len(numbers)),
                segment.first_position,
                segment.num_tokens,
                segment.generation,
                segment.num_bytes,
                segment.checksum,
            )
            for segment in segments
        ],
        dtype="<u8",
    )
    line = json.dumps({"format": FORMAT, "namespaces": list(numbers)}).encode() + b"\n"
    body = line + rows.tobytes()
    written, whole = 0, memoryview(xxhash.xxh3_128_digest(body) + body)
    descriptor = files.create(folder / _UNFINISHED)
    try:
        while written < len(whole):
            written += files.write(descriptor, whole[written:])
        files.sync(descriptor)
    finally:
        files.close(descriptor)
    files.rename(folder / _UNFINISHED, folder / INDEX_FILE)


def read_index(files: Files, folder: Path) -> dict[SegmentId, Segment]:
    """Read the segments of the index; empty if it is missing, damaged or cannot be read."""
    try:
        raw = _read(files, folder / INDEX_FILE)
        check, body = raw[:_CHECK_BYTES], raw[_CHECK_BYTES:]
        if xxhash.xxh3_128_digest(body) != check:
            return {}
        line, _, table = body.partition(b"\n")
        header = json.loads(line)
        if header["format"] != FORMAT:
            return {}
        names: list[str] = header["namespaces"]
        rows = np.frombuffer(table, dtype="<u8").reshape(-1, _COLUMNS).tolist()
        return {
            row[0]: Segment(SegmentId(row[0]), names[row[1]], *row[2:])  # in the order of its fields
            for row in rows
        }
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


def delete_index(files: Files, folder: Path) -> None:
    """Delete the index of a folder whose objects are deleted, if possible."""
    for name in (INDEX_FILE, _UNFINISHED):
        with suppress(OSError):
            files.delete(folder / name)


def _read(files: Files, path: Path) -> bytes:
    descriptor, parts, page = files.open(path), [], memoryview(bytearray(_CHUNK))
    try:
        start = 0
        while count := files.read(descriptor, page, start):
            parts.append(bytes(page[:count]))
            start += count
    finally:
        files.close(descriptor)
    return b"".join(parts)
