"""
Any file -> raw rows: JSON lines or one JSON array, plain, gzip or zstd; Parquet.

Files are recognised by content, not by name. This module knows no log format.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from kvshare.errors import LogError
from kvshare.extras import require
from kvshare.replay.readers.rows import Reason

MAX_ROW_BYTES = 64 << 20
_GZIP, _ZSTD, _PARQUET = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"PAR1"
_BOM = b"\xef\xbb\xbf"
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*([{\]]|\Z)")  # a line of a log may begin with [INFO]
_OUTSIDE = re.compile(rb'["{}\[\],]')  # of a string, in an array
_INSIDE = re.compile(rb'["\\]')
_CHUNK_BYTES = 1 << 20
_PEEK_BYTES = 4096
_ZSTD_STEP = 4096  # compressed bytes at a time: what they expand to stays small
_BATCH_ROWS = 64  # of a Parquet file
# Large fields of published data sets that nothing here reads.
_UNUSED = frozenset({"openai_moderation", "detoxify_moderation", "header"})
_NO_PYTHON_VALUE = (pyarrow.ArrowException, ValueError, OverflowError)  # the year 10000, nanoseconds
_BROKEN = (EOFError, OSError, zlib.error, zstandard.ZstdError)

Row = Mapping[str, Any]


def raw_rows(path: Path) -> Iterator[tuple[int, Row | Reason]]:
    """
    (number of the line from 1, the row or the reason why it cannot be read), lazily, in the file's order.

    Raises LogError if the file cannot be opened; MissingExtraError if zstd or Parquet cannot be read here.
    """
    try:
        with path.open("rb") as file:
            magic = file.peek(4)[:4]
            yield from _parquet_rows(path) if magic == _PARQUET else _json_rows(_unpacked(file, magic))
    except (FileNotFoundError, IsADirectoryError, PermissionError) as exc:
        raise LogError(f"{path.name}: cannot be opened: {exc.strerror}") from exc


def _unpacked(file: io.BufferedReader, magic: bytes) -> io.BufferedReader | gzip.GzipFile:
    if magic.startswith(_GZIP):
        return gzip.GzipFile(fileobj=file)
    if magic == _ZSTD:
        require("replay", what="reading a file compressed with zstd")
        return io.BufferedReader(_Joined(_frames(file)))
    return file


def _frames(file: IO[bytes]) -> Iterator[bytes]:
    """The content of zstd frames. zstandard's own reader ends silently in a truncated frame."""
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
        raise EOFError("a zstd frame is truncated")


class _Joined(io.RawIOBase):
    """Pieces of bytes that are read as one file."""

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


def _json_rows(stream: io.BufferedReader | gzip.GzipFile) -> Iterator[tuple[int, Row | Reason]]:
    line = 0
    try:
        is_array = _ARRAY.match(stream.peek(_PEEK_BYTES)[:_PEEK_BYTES]) is not None
        numbered = array_elements(stream, max_bytes=MAX_ROW_BYTES) if is_array else _lines(stream)
        for line, data in numbered:
            yield line, data if isinstance(data, Reason) else _parsed(data)
    except _BROKEN:
        yield line + 1, Reason.TRUNCATED


def _lines(stream: io.BufferedReader | gzip.GzipFile) -> Iterator[tuple[int, bytes | Reason]]:
    """Blank lines are no rows; they are counted in the line numbers."""
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


def _parquet_rows(path: Path) -> Iterator[tuple[int, Row | Reason]]:
    """
    (row number from 1, the row as a dictionary, or a reason in its place).

    A value that cannot be read costs its row; bytes that cannot be decoded cost the rest of their row group,
    because pyarrow cannot skip less.
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
            yield from zip(count(first), islice(rows, num_rows), strict=False)
            first += num_rows


def _group_rows(
    file: pyarrow.parquet.ParquetFile, group: int, columns: Sequence[str]
) -> Iterator[Row | Reason]:
    """The rows of the group up to the first that cannot be decoded."""
    try:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS, row_groups=[group], columns=columns):
            yield from _batch_rows(batch)
    except (pyarrow.ArrowException, OSError):
        return


def _batch_rows(batch: pyarrow.RecordBatch) -> Iterator[Row | Reason]:
    try:
        yield from batch.to_pylist()
    except _NO_PYTHON_VALUE as exc:
        if batch.num_rows > 1:
            yield from chain.from_iterable(_batch_rows(batch.slice(i, 1)) for i in range(batch.num_rows))
        else:
            yield Reason.BAD_UTF8 if isinstance(exc, UnicodeDecodeError) else Reason.WRONG_TYPE


def array_elements(stream: io.BufferedIOBase, *, max_bytes: int) -> Iterator[tuple[int, bytes | Reason]]:
    """
    The elements of one large JSON array: (number from 1, its bytes), or a reason in place of the bytes.

    Finds the ends of elements; the caller parses them, so that a broken element costs no other. An element of
    more than `max_bytes` is TOO_LONG; an array without an end is TRUNCATED there.
    """
    number = depth = 0
    in_string = too_long = False
    element = bytearray()  # the one read so far
    position = 0  # of the next byte to look at; past the element's end after a backslash
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
                    yield number, Reason.TOO_LONG if too_long else bytes(element[: match.start()])
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
    yield number + 1, Reason.TRUNCATED
