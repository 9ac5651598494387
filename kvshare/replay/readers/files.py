"""
Any file -> raw rows: JSON lines or one JSON array, plain, gzip or zstd; Parquet.

Recognised by content, not by name. Knows no format of logs; the only file that imports zstandard.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import IO, Any, cast

import pyarrow
import pyarrow.parquet
import zstandard

from kvshare.errors import LogError
from kvshare.replay.readers.rows import Reason

MAX_ROW_BYTES = 64 << 20
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_BOM = b"\xef\xbb\xbf"
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*([{\]]|\Z)")  # a line of a log may begin with [INFO]
_OUTSIDE = re.compile(rb'["{}\[\],]')  # of a string, in an array
_INSIDE = re.compile(rb'["\\]')
_CHUNK_BYTES = 1 << 20
_PEEK_BYTES = 4096
_ZSTD_STEP = 4096  # compressed bytes at a time: few enough that what they come to stays small
_BATCH_ROWS = 64  # of a Parquet file
# Of the published data sets: large, and nothing here asks for them.
_UNUSED = frozenset({"openai_moderation", "detoxify_moderation", "header"})
_NO_PYTHON_VALUE = (pyarrow.ArrowException, ValueError, OverflowError)  # the year 10000, nanoseconds
_BROKEN = (EOFError, OSError, zlib.error, zstandard.ZstdError)


Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RawRow:
    """A JSON object, or the reason why there is none."""

    line: int
    value: Row | Reason


def raw_rows(path: Path) -> Iterator[RawRow]:
    """Rows in the file's order, read as they are asked for. Raises LogError if the file cannot be opened."""
    try:
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == _PARQUET:
            yield from _parquet_rows(path)
            return
        with _opened(path, magic) as stream:
            yield from _json_rows(stream)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as exc:
        raise LogError(f"{path.name}: cannot be opened: {exc.strerror}") from exc


@contextmanager
def _opened(path: Path, magic: bytes) -> Iterator[io.BufferedReader | gzip.GzipFile]:
    with path.open("rb") as file:
        if magic.startswith(_GZIP):
            with gzip.GzipFile(fileobj=file) as unzipped:
                yield unzipped
        elif magic == _ZSTD:
            yield io.BufferedReader(_ZstdReader(file))
        else:
            yield file


class _ZstdReader(io.RawIOBase):
    """Like zstandard's own reader, but a frame that breaks off is an EOFError and not a quiet end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._frame = _new_frame()
        self._inside = False  # of a frame
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame, self._inside = _new_frame(), False
            data = data or self._file.read(_ZSTD_STEP)
            if not data:
                if self._inside:
                    raise EOFError("a zstd frame breaks off")
                return 0
            self._inside = True
            self._ready = memoryview(self._frame.decompress(data))
        length = min(len(buffer), len(self._ready))
        buffer[:length] = self._ready[:length]
        self._ready = self._ready[length:]
        return length


def _new_frame() -> zstandard.ZstdDecompressionObj:
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def _json_rows(stream: io.BufferedReader | gzip.GzipFile) -> Iterator[RawRow]:
    line = 0
    try:
        is_array = _ARRAY.match(stream.peek(_PEEK_BYTES)[:_PEEK_BYTES]) is not None
        numbered = array_elements(stream, max_bytes=MAX_ROW_BYTES) if is_array else _lines(stream)
        for line, data in numbered:
            yield RawRow(line, data if isinstance(data, Reason) else _parsed(data))
    except _BROKEN:
        yield RawRow(line + 1, Reason.TRUNCATED)


def _lines(stream: io.BufferedReader | gzip.GzipFile) -> Iterator[tuple[int, bytes | Reason]]:
    """Without those that are blank: they are no rows, but they have numbers."""
    number = 0
    while line := stream.readline(MAX_ROW_BYTES):
        number += 1
        if len(line) < MAX_ROW_BYTES or line.endswith(b"\n"):
            line = line.removeprefix(_BOM) if number == 1 else line
            if line.strip():
                yield number, line
            continue
        while (rest := stream.readline(MAX_ROW_BYTES)) and not rest.endswith(b"\n"):
            pass
        yield number, Reason.TOO_LONG


def _parsed(data: bytes) -> Row | Reason:
    if not data.strip():  # in an array, between two commas
        return Reason.EMPTY
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        return Reason.BAD_UTF8
    except (ValueError, RecursionError):  # a number of 5000 digits is a ValueError
        return Reason.BAD_JSON
    return value if isinstance(value, dict) else Reason.NOT_AN_OBJECT


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    """
    (row number from 1, the row as a dictionary), or a reason in place of the row.

    What cannot be read costs no other row: a value costs its row, bytes that cannot be decoded the rest of
    their row group, which is as far as pyarrow lets anybody step over.
    """
    try:
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as exc:
        raise LogError(f"{path.name}: begins as Parquet, but cannot be read as such") from exc
    with file:
        columns = [name for name in file.schema_arrow.names if name not in _UNUSED]
        first = 1
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            rows = chain(_group_rows(file, group, columns), repeat(Reason.DAMAGED))
            yield from map(RawRow, count(first), islice(rows, num_rows))
            first += num_rows


def _group_rows(
    file: pyarrow.parquet.ParquetFile, group: int, columns: Sequence[str]
) -> Iterator[Row | Reason]:
    """As many rows of the group as can be decoded."""
    try:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns):
            yield from _batch_rows(batch)
    except (pyarrow.ArrowException, OSError):
        return


def _batch_rows(batch: pyarrow.RecordBatch) -> Iterator[Row | Reason]:
    try:
        yield from batch.to_pylist()
    except _NO_PYTHON_VALUE:
        yield from (_single_row(batch.slice(place, 1)) for place in range(batch.num_rows))


def _single_row(batch: pyarrow.RecordBatch) -> Row | Reason:
    try:
        (row,) = batch.to_pylist()
    except UnicodeDecodeError:
        return Reason.BAD_UTF8
    except _NO_PYTHON_VALUE:
        return Reason.WRONG_TYPE
    return cast(Row, row)


def array_elements(stream: io.BufferedIOBase, *, max_bytes: int) -> Iterator[tuple[int, bytes | Reason]]:
    """
    The elements of one large JSON array: (number from 1, its bytes), or a reason in place of the bytes.

    Finds where elements end and leaves parsing them to the caller, so that a broken one costs only itself. An
    element of more than `max_bytes` is TOO_LONG; an array without an end is TRUNCATED there.
    """
    scanner = _Scanner(max_bytes)
    number = 0
    while chunk := stream.read(_CHUNK_BYTES):
        for element in scanner.feed(chunk):
            number += 1
            yield number, element
        if scanner.at_end:
            return
    yield number + 1, Reason.TRUNCATED


class _Scanner:
    """Where we are: how deep, in a string or not, and the element read so far."""

    def __init__(self, max_bytes: int) -> None:
        self.at_end = False
        self._max_bytes = max_bytes
        self._depth = 0
        self._in_string = False
        self._too_long = False
        self._any = False  # element, so far
        self._buffer = bytearray()
        self._position = 0  # of the next byte to look at; may lie past the buffer, after a backslash

    def feed(self, chunk: bytes) -> Iterator[bytes | Reason]:
        """The elements that end in this chunk."""
        self._buffer += chunk
        while not self.at_end:
            match = (_INSIDE if self._in_string else _OUTSIDE).search(self._buffer, self._position)
            if match is None:
                self._position = max(self._position, len(self._buffer))
                break
            self._position = match.end()
            yield from self._step(match.group(), match.start())
        if len(self._buffer) > self._max_bytes:
            self._too_long = True
            self._position -= len(self._buffer)
            self._buffer.clear()

    def _step(self, character: bytes, start: int) -> Iterator[bytes | Reason]:
        if self._in_string:
            if character == b"\\":
                self._position += 1
            else:
                self._in_string = False
        elif character == b'"':
            self._in_string = True
        elif character in b"[{":
            self._depth += 1
            if self._depth == 1:
                self._drop()
        elif character in b"]}":
            self._depth -= 1
            self.at_end = self._depth == 0
            if self.at_end and (self._any or self._too_long or self._buffer[:start].strip()):
                yield self._element(start)
        elif self._depth == 1:
            self._any = True
            yield self._element(start)
            self._drop()

    def _element(self, end: int) -> bytes | Reason:
        if self._too_long:
            self._too_long = False
            return Reason.TOO_LONG
        return bytes(self._buffer[:end])

    def _drop(self) -> None:
        """The element is done; the next begins behind the comma."""
        del self._buffer[: self._position]
        self._position = 0
