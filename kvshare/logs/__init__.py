"""
Log files -> rows of requests: the log formats by name, their detection, and `read_file`.

    files.py     any file -> raw rows: JSON lines, JSON arrays, gzip, zstd, Parquet
    chats.py     a raw row that is a conversation -> `LoggedRow`; prompts.py: one request
    fields.py    what the formats have in common: texts, numbers, times, messages
    names.py     what the formats call the same thing
    rows.py      what a row is read as, and the count of rows that cannot be read (unreadable.py)
    requests.py  `LoggedRequest`: what a row becomes

A row that cannot be read is counted with its file, line and a fixed word, never with its text. One row is in
memory at a time and its size is limited, so that memory does not grow with the file.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from kvshare.errors import LogError
from kvshare.logs import chats, fields, prompts
from kvshare.logs.files import Row, raw_rows
from kvshare.logs.requests import LoggedRequest
from kvshare.logs.rows import LoggedRow, ReadReport, RowError, RowFault, Turn

__all__ = ["FORMATS", "LoggedRow", "ReadReport", "RowFault", "Turn", "read_file"]

_NUM_DETECT = 32


@dataclass(frozen=True, slots=True)
class Format:
    """
    Turns the rows of one published format into requests. `convert` completes a request that has only the
    place of its row, which is also its conversation where the log names none.

    It yields a `RowFault` for one of several requests of a row that cannot be read, and raises a RowError for
    a row.
    """

    name: str
    matches: Callable[[Row], bool]
    convert: Callable[[Row, LoggedRequest], Iterator[LoggedRow | RowFault]]


def _has(*names: str) -> Callable[[Row], bool]:
    return lambda row: all(name in row for name in names)


# In the order of detection: formats with the most specific fields first.
FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format("mooncake", _has("hash_ids", "input_length"), prompts.read_mooncake),
        Format("azure", _has("ContextTokens", "GeneratedTokens"), prompts.refuse_azure),
        Format("wildchat", chats.is_wildchat, chats.read_wildchat),
        Format("lmsys", chats.is_lmsys, chats.read_lmsys),
        Format("sharegpt", _has("conversations"), chats.read_sharegpt),
        Format("openai", prompts.is_body, prompts.read_body),
        Format("prompts", prompts.is_prompt, prompts.read_prompts),
        Format("conversations", chats.is_conversation, chats.read_conversation),
        Format("plain", prompts.is_plain, prompts.read_plain),
    )
}
_OFFERED = ", ".join(name for name in FORMATS if name != "azure")  # which is always refused


def read_file(
    path: Path, report: ReadReport, *, format_name: str | None = None, source: str | None = None
) -> Iterator[LoggedRow]:
    """
    Rows of a log; `report` counts those that cannot be read. `source` is the file's name there.

    Raises LogError if there is no such file or format, no row in any known format, or no content; at the
    end, if none of its rows holds a request that can be read.
    """
    source = source or path.name
    rows = (
        (line, raw if isinstance(raw, RowFault) else fields.unpacked(raw)) for line, raw in raw_rows(path)
    )
    head = list(islice(rows, _NUM_DETECT))
    chosen = _named(format_name) if format_name is not None else _detected(source, head)
    report.formats[source] = chosen.name
    num_rows, is_readable, reasons = 0, False, Counter[RowFault]()
    for line, raw in chain(head, rows):
        num_rows += 1
        for row in _converted(chosen, raw, LoggedRequest(source, line, f"{source}#{line}")):
            if isinstance(row, RowFault):
                reasons[row] += 1
                report.count_unreadable(source, line, row)
            else:
                is_readable = True
                yield row
    if not is_readable:
        raise LogError(_why_nothing(source, chosen.name, num_rows, reasons))


def _converted(chosen: Format, raw: Row | RowFault, blank: LoggedRequest) -> Iterator[LoggedRow | RowFault]:
    try:
        yield from (raw,) if isinstance(raw, RowFault) else chosen.convert(raw, blank)
    except RowError as exc:
        yield exc.reason


def _why_nothing(source: str, format_name: str, num_rows: int, reasons: Mapping[RowFault, int]) -> str:
    counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    rows = "its only row does not hold" if num_rows == 1 else f"none of its {num_rows} rows holds"
    return (
        f"{source}: {rows} a request that can be read as {format_name} (reasons and how often: {counts}); "
        f"docs/replay.md says what each format must have; --format names another: one of {_OFFERED}, or "
        "plain:FIELD"
    )


def _named(name: str) -> Format:
    """Return the format of this name; "plain:FIELD" has its prompts in that field."""
    base, _, field = name.partition(":")
    if base == "plain" and field:
        return replace(FORMATS[base], convert=lambda row, blank: prompts.read_field(row, blank, field))
    if name not in FORMATS:
        raise LogError(f"--format: unknown format {name!r}; expected one of {_OFFERED}, or plain:FIELD")
    return FORMATS[name]


def _detected(source: str, head: list[tuple[int, Row | RowFault]]) -> Format:
    """Return the first format that reads any of these rows; if none does, the first that fits any."""
    if not head:
        raise LogError(f"{source} is empty: it has no rows")
    rows = [raw for _, raw in head if not isinstance(raw, RowFault)]
    fitting = [each for each in FORMATS.values() if any(map(each.matches, rows))]
    if not fitting:
        reasons = sorted({str(raw) for _, raw in head if isinstance(raw, RowFault)})
        seen = f" ({', '.join(reasons)})" if reasons else ""
        raise LogError(
            f"{source}: none of the first {len(head)} rows{seen} is in a known format; name the format with "
            f"--format: one of {_OFFERED}, or plain:FIELD with the field of the prompt"
        )
    blank = LoggedRequest(source, 0, source)
    return next((each for each in fitting if _reads_any(each, rows, blank)), fitting[0])


def _reads_any(chosen: Format, rows: list[Row], blank: LoggedRequest) -> bool:
    return any(not isinstance(row, RowFault) for raw in rows for row in _converted(chosen, raw, blank))
