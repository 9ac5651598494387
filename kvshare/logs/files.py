"""
Reads raw rows from a file: JSON lines or one JSON array, plain, gzip or zstd; or Parquet.

The kind of file is recognised by its content, not by its name; formats of logs are not known here. zstandard
and pyarrow are imported when a file needs them, so `kvshare warm` reads JSON without the extra `replay`.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kvshare.errors import LogError
from kvshare.extras import require
from kvshare.logs.rows import RowFault

if TYPE_CHECKING:
    from pyarrow import RecordBatch
    from pyarrow.parquet import ParquetFile

MAX_ROW_BYTES = 64 << 20
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_BOM = b"\xef\xbb\xbf"
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*([{\]]|\Z)")  # a line of a log may begin with [INFO]
_OUTSIDE = re.compile(rb'["{}\[\],]')  # of a string, in an array
_INSIDE = re.compile(rb'["\\]')
_CHUNK_BYTES = 1 << 20
_PEEK_BYTES = 4096
_ZSTD_STEP = 4096  # compressed bytes at a time: so few that they do not decompress to very much
_BROKEN = (EOFError, OSError, zlib.error)
_BATCH_ROWS = 64
# Large columns of published data sets, which no reader needs.
_UNUSED_COLUMNS = frozenset({"openai_moderation", "detoxify_moderation", "header"})

Row = Mapping[str, Any]


def raw_rows(path: Path) -> Iterator[tuple[int, Row | RowFault]]:
    """
    Yield (number of the line from 1, the row or why it cannot be read), in the file's order. Reads lazily.

    Raises LogError if the file cannot be opened; MissingExtraError if zstd or Parquet cannot be read here.
    """
    try:
        with path.open("rb") as file:
            magic = file.peek(4)[:4]
            yield from _parquet_rows(path) if magic == _PARQUET else _json_rows(_unpacked(file, magic))
    except (FileNotFoundError, IsADirectoryError, PermissionError) as exc:
        raise LogError(f"{path}: cannot be opened: {exc.strerror}") from exc


def _unpacked(file: io.BufferedReader, magic: bytes) -> io.BufferedReader | gzip.GzipFile:
    if magic.startswith(_GZIP):
        return gzip.GzipFile(fileobj=file)
    if magic == _ZSTD:
        require("replay", what="reading a file compressed with zstd")
        return io.BufferedReader(_Joined(_frames(file)))
    return file


def _frames(file: IO[bytes]) -> Iterator[bytes]:
    """
    Decompress zstd frames. zstandard's own reader would take a frame that breaks off for the end.

    Raises:  EOFError where the last frame breaks off, OSError where one is damaged
    """
    import zstandard

    frame: zstandard.ZstdDecompressionObj | None = None
    while data := file.read(_ZSTD_STEP):
        while data:
            frame = frame or zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as exc:
                raise OSError("a zstd frame is damaged") from exc
            data, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
    if frame is not None:
        raise EOFError("a zstd frame breaks off")


class _Joined(io.RawIOBase):
    """Pieces, to be read as one file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = filter(None, pieces)
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._ready = self._ready or memoryview(next(self._pieces, b""))
        length = min(len(buffer), len(self._ready))
        buffer[:length] = self._ready[:length]
        self._ready = self._ready[length:]
        return length


def _json_rows(stream: io.BufferedReader | gzip.GzipFile) -> Iterator[tuple[int, Row | RowFault]]:
    line = 0
    try:
        is_array = _ARRAY.match(stream.peek(_PEEK_BYTES)[:_PEEK_BYTES]) is not None
        numbered = array_elements(stream, max_bytes=MAX_ROW_BYTES) if is_array else _lines(stream)
        for line, data in numbered:
            yield line, data if isinstance(data, RowFault) else _parsed(data)
    except _BROKEN:
        yield line + 1, RowFault.TRUNCATED


def _lines(stream: io.BufferedReader | gzip.GzipFile) -> Iterator[tuple[int, bytes | RowFault]]:
    """Yield each line with its number. Blank lines are counted and not yielded, as they are not rows."""
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
        yield number, RowFault.TOO_LONG


def _parsed(data: bytes) -> Row | RowFault:
    if not data.strip():  # in an array, between two commas
        return RowFault.EMPTY
    try:
        value = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        return RowFault.BAD_UTF8
    except (ValueError, RecursionError):  # a number of 5000 digits is a ValueError
        return RowFault.BAD_JSON
    return value if isinstance(value, dict) else RowFault.NOT_AN_OBJECT


def array_elements(stream: io.BufferedIOBase, *, max_bytes: int) -> Iterator[tuple[int, bytes | RowFault]]:
    """
    Yield the elements of one large JSON array: (number from 1, its bytes), or a reason in place of the bytes.

    Finds where elements end and leaves parsing them to the caller, so that a broken one costs only itself. An
    element of more than `max_bytes` is TOO_LONG; an array without an end is TRUNCATED there.
    """
    number = depth = 0
    in_string = too_long = False
    element = bytearray()  # the one read so far
    position = 0  # the next byte to look at; after a backslash it may lie beyond what was read so far
    while chunk := stream.read(_CHUNK_BYTES):
        element += chunk
        while match := (_INSIDE if in_string else _OUTSIDE).search(element, position):
            sign, position = match.group(), match.end()
            if in_string:
                in_string = sign != b'"'
                position += sign == b"\\"
                continue
            in_string = sign == b'"'
            depth += (sign in b"[{") - (sign in b"]}")
            begins = depth == 1 and sign in b"[{"
            if depth == 0 or (depth == 1 and sign == b","):
                if number or too_long or sign == b"," or element[: match.start()].strip():
                    number += 1
                    yield number, RowFault.TOO_LONG if too_long else bytes(element[: match.start()])
                if depth == 0:
                    return
                begins, too_long = True, False
            if begins:
                del element[:position]
                position = 0
        position = max(position, len(element))
        if len(element) > max_bytes:
            too_long = True
            position -= len(element)
            element.clear()
    yield number + 1, RowFault.TRUNCATED


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row | RowFault]]:
    """
    Read the rows that can be read. An unreadable value costs its row; bytes that cannot be decoded cost the
    rest of their row group, as pyarrow can skip no less.
    """
    require("replay", what="reading Parquet")
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    try:
        file = ParquetFile(path, pre_buffer=False)
    except (ArrowException, OSError) as exc:
        raise LogError(f"{path.name}: begins as Parquet, but cannot be read as such") from exc
    with file:
        first = 1
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            rows = chain(_group_rows(file, group), repeat(RowFault.DAMAGED))
            yield from zip(count(first), islice(rows, num_rows), strict=False)
            first += num_rows


def _group_rows(file: ParquetFile, group: int) -> Iterator[Row | RowFault]:
    """Yield as many rows of the group as can be decoded."""
    from pyarrow import ArrowException

    columns = [name for name in file.schema_arrow.names if name not in _UNUSED_COLUMNS]
    try:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns):
            yield from _batch_rows(batch)
    except (ArrowException, OSError):
        return


def _batch_rows(batch: RecordBatch) -> Iterator[Row | RowFault]:
    from pyarrow import ArrowException

    try:
        yield from batch.to_pylist()
    except (ArrowException, ValueError, OverflowError) as exc:  # no Python value: the year 10000, nanoseconds
        if batch.num_rows > 1:
            yield from chain.from_iterable(_batch_rows(batch.slice(i, 1)) for i in range(batch.num_rows))
        else:
            yield (RowFault.BAD_UTF8 if isinstance(exc, UnicodeDecodeError) else RowFault.WRONG_TYPE)
