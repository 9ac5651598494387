"""
Log files -> rows of requests, one file per published format.

    files.py          any file -> raw rows: JSON lines, gzip, zstd; arrays.py: JSON arrays; parquet.py
    formats.py        which format the first rows are in; `--format` names one of them
    wildchat.py ...   one raw row -> `LoggedRow`s, or a `RowError`
    fields.py         what the formats have in common: texts, numbers, times, messages
    read.py           all of it: `read_file`

A row that cannot be read is counted with its file, line and a fixed reason word, never with its text. Memory
holds one row at a time, and a row is bounded, so it does not grow with the file.
"""

from kvshare.replay.readers.formats import FORMATS, Format, detect
from kvshare.replay.readers.read import read_file, read_requests
from kvshare.replay.readers.row import LoggedRow, Turn
from kvshare.replay.readers.unreadable import ReadReport, Reason, RowError, Unreadable

__all__ = [
    "FORMATS",
    "Format",
    "LoggedRow",
    "ReadReport",
    "Reason",
    "RowError",
    "Turn",
    "Unreadable",
    "detect",
    "read_file",
    "read_requests",
]
