"""Rows that cannot be read: told by file, line and one word. Never holds any of their text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

NUM_SHOWN = 20


class Reason(StrEnum):
    """Why a row is no request. The words are part of `results.json`."""

    BAD_UTF8 = "bad_utf8"  # bytes that are no UTF-8, or text that cannot be written as UTF-8
    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"  # JSON, but a number or a list
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    UNKNOWN_ROLE = "unknown_role"  # of a message
    NOT_TEXT = "not_text"  # a message with an image or a sound
    NO_USER_TURN = "no_user_turn"  # a conversation in which nobody asks
    EMPTY = "empty"  # no messages, or no text in any of them
    TOO_LONG = "too_long"  # a row longer than `MAX_ROW_BYTES`
    TRUNCATED = "truncated"  # a compressed file or a JSON array that breaks off: what follows is lost
    DAMAGED = "damaged"  # stands in a part of a Parquet file that cannot be decoded


class RowError(Exception):
    """Raised by the formats: this row is no request."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Unreadable:
    """One row that could not be read, or one request of a row that holds several."""

    source: str  # file name
    line: int  # from 1; a row number in Parquet and in a JSON array
    reason: Reason


class ReadReport:
    """Counts what was read and what could not be, over all files; keeps the first few for display."""

    def __init__(self) -> None:
        self.num_rows: Counter[str] = Counter()  # readable ones, by source
        self.num_requests: Counter[str] = Counter()  # by source
        self.formats: dict[str, str] = {}  # source -> name of its format
        self.examples: list[Unreadable] = []  # the first `NUM_SHOWN`
        self._unreadable: Counter[tuple[str, Reason]] = Counter()

    def count_row(self, source: str, num_requests: int) -> None:
        """A row was read."""
        self.num_rows[source] += 1
        self.num_requests[source] += num_requests

    def count_unreadable(self, source: str, line: int, reason: Reason) -> None:
        """A row was not."""
        self._unreadable[source, reason] += 1
        if len(self.examples) < NUM_SHOWN:
            self.examples.append(Unreadable(source, line, reason))

    @property
    def num_unreadable(self) -> int:
        return self._unreadable.total()

    def unreadable_of(self, source: str) -> Mapping[Reason, int]:
        """How many rows of this file, by reason."""
        return {reason: count for (of, reason), count in sorted(self._unreadable.items()) if of == source}

    @property
    def reasons(self) -> Mapping[Reason, int]:
        """How many rows, by reason, over all files."""
        counts: Counter[Reason] = Counter()
        for (_, reason), count in self._unreadable.items():
            counts[reason] += count
        return dict(sorted(counts.items()))

    def to_dict(self) -> dict[str, object]:
        """As it stands in `results.json`."""
        return {
            "num_rows": self.num_unreadable,
            "reasons": {str(reason): count for reason, count in self.reasons.items()},
            "lines": [
                {"source": row.source, "line": row.line, "reason": str(row.reason)} for row in self.examples
            ],
        }
