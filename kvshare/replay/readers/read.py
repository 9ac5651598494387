"""One file -> rows of requests, in the file's order, read as they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

from kvshare.errors import LogError
from kvshare.replay.readers.files import RawRow, raw_rows
from kvshare.replay.readers.formats import Format, detect, named, offered
from kvshare.replay.readers.row import LoggedRow, Place
from kvshare.replay.readers.unreadable import ReadReport, Reason, RowError
from kvshare.replay.requests import LoggedRequest

_NUM_DETECT = 32


def read_file(
    path: Path, report: ReadReport, *, format_name: str | None = None, source: str | None = None
) -> Iterator[LoggedRow]:
    """
    Rows of a log; what cannot be read goes into `report`. `source` names the file there, its name by default.

    Raises LogError where there is no such file, no such format, or no row of any known format.
    """
    source = source or path.name
    rows = raw_rows(path)
    head = list(islice(rows, _NUM_DETECT))
    chosen = _format(source, head, format_name)
    report.formats[source] = chosen.name
    for raw in chain(head, rows):
        if raw.value is None:
            assert raw.reason is not None
            report.count_unreadable(source, raw.line, raw.reason)
            continue
        readable = []
        for row in _converted(chosen, raw.value, Place(source, raw.line)):
            if isinstance(row, Reason):
                report.count_unreadable(source, raw.line, row)
            else:
                readable.append(row)
        if readable:
            report.count_row(source, sum(row.num_requests for row in readable))
        yield from readable


def read_requests(
    path: Path, report: ReadReport, *, format_name: str | None = None
) -> Iterator[LoggedRequest]:
    """The same, request by request."""
    for row in read_file(path, report, format_name=format_name):
        yield from row


def _converted(chosen: Format, value: Mapping[str, Any], place: Place) -> Iterator[LoggedRow | Reason]:
    try:
        yield from chosen.convert(value, place)
    except RowError as exc:
        yield exc.reason


def _format(source: str, head: list[RawRow], name: str | None) -> Format:
    if name is not None:
        chosen = named(name)
        if chosen is None:
            raise LogError(f"no log format {name!r}; there are {offered()} and plain:FIELD")
        return chosen
    if not head:
        raise LogError(f"{source} is empty: it has no rows")
    found = detect([raw.value for raw in head if raw.value is not None])
    if found is None:
        reasons = sorted({str(raw.reason) for raw in head if raw.reason is not None})
        seen = f" ({', '.join(reasons)})" if reasons else ""
        raise LogError(
            f"{source}: none of the first {len(head)} rows{seen} is in a known format; "
            f"name it with --format, one of {offered()}, or plain:FIELD with the prompt's field"
        )
    return found
