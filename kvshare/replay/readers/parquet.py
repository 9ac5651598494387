"""Parquet -> raw rows; the only file of the readers that imports pyarrow, and read when a log is Parquet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, count, islice, repeat
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from kvshare.errors import LogError
from kvshare.replay.readers.rows import Reason

_BATCH_ROWS = 64
# Of the published data sets: large, and nothing here asks for them.
_UNUSED = frozenset({"openai_moderation", "detoxify_moderation", "header"})
_NO_PYTHON_VALUE = (pyarrow.ArrowException, ValueError, OverflowError)  # the year 10000, nanoseconds

Row = Mapping[str, Any]


def parquet_rows(path: Path) -> Iterator[tuple[int, Row | Reason]]:
    """
    (row number from 1, the row as a dictionary), or a reason in place of the row.

    What cannot be read costs no other row: a value costs its row, bytes that cannot be decoded the rest of
    their row group, as pyarrow can skip no less.

    Raises:  LogError if it is no Parquet file after all
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
    """As many rows of the group as can be decoded."""
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
