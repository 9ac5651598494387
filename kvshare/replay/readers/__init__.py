"""
Log files -> rows of requests.

    files.py     any file -> raw rows: JSON lines, JSON arrays, gzip, zstd, Parquet
    chats.py     a raw row that is a conversation -> `LoggedRow`, or a `RowError`; prompts.py: one request,
                 openai.py: a request's body
    fields.py    what the formats have in common: texts, numbers, times, messages
    formats.py   the formats by name, which one the first rows are in, and all of it: `read_file`
    rows.py      what a row came to, and the count of those that came to nothing

A row that cannot be read is counted with its file, line and a fixed reason word, never with its text. Memory
holds one row at a time, and a row is bounded, so it does not grow with the file.
"""

from kvshare.replay.readers.formats import FORMATS, read_file
from kvshare.replay.readers.rows import LoggedRow, ReadReport, Reason, Turn

__all__ = [
    "FORMATS",
    "LoggedRow",
    "ReadReport",
    "Reason",
    "Turn",
    "read_file",
]
