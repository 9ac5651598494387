"""
A row of a log is read as a request, as a conversation of which every user turn is a request, or as a reason
why it was not read.

Rows that cannot be read are counted by file, line and one word, without their text.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from kvshare.logs.requests import LoggedRequest
from kvshare.logs.unreadable import Unreadable, UnreadableLine

NUM_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation: the messages up to it, and its time."""

    num_messages: int
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoggedRow:
    """
    Without `turns`, `request` is the request itself. Otherwise its messages are the whole conversation, and
    each turn is a request, which `at` makes: a long conversation is stored once.

    `turn_by_order`: the log names the conversation and no turn; the stream knows the order and counts turns.
    """

    request: LoggedRequest
    turns: tuple[Turn, ...] = ()
    turn_by_order: bool = False

    @property
    def num_requests(self) -> int:
        return max(1, len(self.turns))

    def __iter__(self) -> Iterator[LoggedRequest]:
        return (self.at(number) for number in range(self.num_requests))

    def turn_and_time(self, number: int) -> tuple[int | None, float | None]:
        """Return the turn and time of request `number`, without making the request."""
        return (number, self.turns[number].time_s) if self.turns else (self.request.turn, self.request.time_s)

    def at(self, number: int) -> LoggedRequest:
        """Request `number` of the row, from 0."""
        if not self.turns:
            return self.request
        end, time_s = self.turns[number].num_messages, self.turns[number].time_s
        messages = self.request.messages or ()
        answers = (said["content"] for said in messages[end : end + 1] if said["role"] == "assistant")
        return replace(
            self.request, turn=number, time_s=time_s, messages=messages[:end], answer=next(answers, None)
        )


class RowFault(StrEnum):
    """The reason why a row cannot be read. The words are part of `results.json`."""

    BAD_UTF8 = "bad_utf8"  # bytes that are not UTF-8, or text that cannot be written as UTF-8
    BAD_JSON = "bad_json"
    NOT_AN_OBJECT = "not_an_object"  # JSON, but a number or a list
    MISSING_FIELD = "missing_field"
    WRONG_TYPE = "wrong_type"
    UNKNOWN_ROLE = "unknown_role"  # of a message
    NOT_TEXT = "not_text"  # a message with an image or a sound
    NO_USER_TURN = "no_user_turn"  # a conversation without a question
    EMPTY = "empty"  # no messages, or no text in any of them
    TOO_LONG = "too_long"  # a row longer than `MAX_ROW_BYTES`
    TRUNCATED = "truncated"  # a compressed file or a JSON array ends too early: the rest is lost
    DAMAGED = "damaged"  # in a part of a Parquet file that cannot be decoded


class RowError(Exception):
    def __init__(self, reason: RowFault) -> None:
        super().__init__(reason.value)
        self.reason = reason


class ReadReport:
    """Counts rows that cannot be read, over all files; stores the first few for display."""

    def __init__(self) -> None:
        self.formats: dict[str, str] = {}  # source -> name of its format
        self.examples: list[UnreadableLine] = []  # the first `NUM_SHOWN`
        self._reasons: Counter[RowFault] = Counter()

    def count_unreadable(self, source: str, line: int, reason: RowFault) -> None:
        self._reasons[reason] += 1
        if len(self.examples) < NUM_SHOWN:
            self.examples.append(UnreadableLine(source=source, line=line, reason=reason))

    @property
    def num_unreadable(self) -> int:
        return self._reasons.total()

    def unreadable(self) -> Unreadable:
        reasons = {str(reason): count for reason, count in sorted(self._reasons.items())}
        return Unreadable(num_rows=self.num_unreadable, reasons=reasons, lines=tuple(self.examples))
