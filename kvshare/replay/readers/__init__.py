"""
Log files -> rows of requests.

    files.py     any file -> raw rows: JSON lines, JSON arrays, gzip, zstd; parquet.py: Parquet
    chats.py     a raw row that is a conversation -> `LoggedRow`; prompts.py: one request, openai.py: a body
    fields.py    what the formats have in common: texts, numbers, times, messages
    formats.py   the formats by name, their detection, and `read_file`
    rows.py      what a row is read as, and the count of rows that cannot be read

A row that cannot be read is counted with its file, line and a fixed word, never with its text. One row is in
memory at a time and its size is limited, so that memory does not grow with the file.
"""

from kvshare.replay.readers.formats import FORMATS, read_file
from kvshare.replay.readers.rows import LoggedRow, ReadReport, Reason, Turn

__all__ = ["FORMATS", "LoggedRow", "ReadReport", "Reason", "Turn", "read_file"]
