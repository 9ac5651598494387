"""
Reads files as entries to compute ahead. Each entry is the body of one request.

    *.txt, *.md       one document: it becomes the only message, the user's, of a chat
    anything else     rows as replay reads them (JSON lines, a JSON array, Parquet; gzip, zstd), each a body:
                      {"messages": [...]} or {"prompt": ...}, with tools and whatever else belongs to it;
                      or a log's row that has such a body in it, as Batch API lines and LiteLLM's spend log

A row's "label" names it in reports. What is said of the answer is replaced: one token, greedy, not streamed.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvshare.errors import LogError
from kvshare.logs.fields import unpacked
from kvshare.logs.files import raw_rows
from kvshare.logs.names import ANSWERS
from kvshare.logs.prompts import body_of
from kvshare.logs.rows import RowError, RowFault

_DOCUMENTS = (".txt", ".md")
_OF_THE_ANSWER = ("label", "stream", "stream_options", "max_completion_tokens", "min_tokens", "n", "best_of")
_SHORTEST_ANSWER = {"max_tokens": 1, "temperature": 0}
_LITELLM = "call_type"  # in rows of its spend log, next to its own model's name
_ASKED = ("messages", "prompt", "tools")
# KV that is copied for others should not be off itself. It is to be stored, whatever the controller tries.
_WANTED = {"mode": "exact", "no_store": False}


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an entry, for reports, which never contain its text."""

    file: str  # as it was given
    line: int  # from 1; 1 for a document
    label: str | None = None


@dataclass(frozen=True, slots=True)
class WarmingEntry:
    """One request to be sent, or the reason why a row is not a request. `body` may have no model yet."""

    place: Place
    path: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)
    reason: RowFault | None = None


def read_entries(paths: Iterable[Path]) -> Iterator[WarmingEntry]:
    """The entries of the files, in order. Raises LogError for a file that cannot be opened or has no rows."""
    for path in paths:
        if path.suffix.lower() in _DOCUMENTS:
            yield _document(path)
        else:
            yield from _rows(path)


def _rows(path: Path) -> Iterator[WarmingEntry]:
    is_empty = True
    for line, row in raw_rows(path):
        is_empty = False
        yield _row(str(path), line, row)
    if is_empty:
        raise LogError(f"{path.name} is empty: it has no rows")


def _document(path: Path) -> WarmingEntry:
    place = Place(str(path), 1)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        return WarmingEntry(place, reason=RowFault.BAD_UTF8)
    except OSError as exc:
        raise LogError(f"{path}: cannot be opened: {exc.strerror}") from exc
    if not text.strip():
        return WarmingEntry(place, reason=RowFault.EMPTY)
    return _entry(place, {"messages": [{"role": "user", "content": text}]})


def _row(file: str, line: int, row: Mapping[str, Any] | RowFault) -> WarmingEntry:
    if isinstance(row, RowFault):
        return WarmingEntry(Place(file, line), reason=row)
    label = row.get("label")
    if not isinstance(label, str | None):
        return WarmingEntry(Place(file, line), reason=RowFault.WRONG_TYPE)
    place = Place(file, line, label)
    try:
        body = _body(row)
    except RowError as exc:
        return WarmingEntry(place, reason=exc.reason)
    reason = _why_no_prompt(body)
    return _entry(place, body) if reason is None else WarmingEntry(place, reason=reason)


def _body(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the request of a row, without what else a log says of it."""
    row = unpacked(row)
    body = body_of(row)
    if body is row and _LITELLM in row:
        return {name: row[name] for name in _ASKED if name in row}
    return {name: value for name, value in body.items() if name not in ANSWERS}


def _why_no_prompt(row: Mapping[str, Any]) -> RowFault | None:
    """Return why a row is not a single prompt. The server checks the rest."""
    content = row.get("messages", row.get("prompt"))
    if content is None:
        return RowFault.MISSING_FIELD
    if not content:
        return RowFault.EMPTY
    if "messages" in row:
        return None if isinstance(content, list) else RowFault.WRONG_TYPE
    is_one = isinstance(content, str) or (isinstance(content, list) and isinstance(content[0], int))
    return None if is_one else RowFault.WRONG_TYPE


def _entry(place: Place, row: Mapping[str, Any]) -> WarmingEntry:
    body = {name: value for name, value in row.items() if name not in _OF_THE_ANSWER}
    path = "v1/chat/completions" if "messages" in row else "v1/completions"
    return WarmingEntry(place, path, {"kvshare": _WANTED, **body, **_SHORTEST_ANSWER})
