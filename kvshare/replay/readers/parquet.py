"""Rows of a Parquet file, in small batches. The only reader that imports pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from kvshare.errors import LogError

_BATCH_ROWS = 64
# Of the published data sets: large, and nothing here asks for them.
_UNUSED = frozenset({"openai_moderation", "detoxify_moderation", "header"})


def parquet_rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any] | None]]:
    """(row number from 1, the row as a dictionary); None where the file is broken from there on."""
    try:
        file = pyarrow.parquet.ParquetFile(path, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as exc:
        raise LogError(f"{path.name}: begins as Parquet, but cannot be read as such") from exc
    with file:
        columns = [name for name in file.schema_arrow.names if name not in _UNUSED]
        number = 0
        try:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError):
            yield number + 1, None
