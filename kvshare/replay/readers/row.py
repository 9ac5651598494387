"""What one row of a log came to: a request, or a conversation of which every user turn is a request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvshare.replay.requests import LoggedRequest


@dataclass(frozen=True, slots=True)
class Place:
    """Where a row stands."""

    source: str
    line: int

    @property
    def name(self) -> str:
        """Names the row within the stream; the conversation's id where the log has none across rows."""
        return f"{self.source}#{self.line}"


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation: what had been said by then, and when it was asked."""

    num_messages: int
    time_s: float | None = None


@dataclass(frozen=True, slots=True)
class LoggedRow:
    """
    `request` with `turns` empty is the request itself. Otherwise its messages are the whole conversation, and
    there is one request per turn, made when it is asked for: a long conversation is kept once.

    `turn_by_order`: the log names the conversation and no turn, so that the stream, which knows the order,
    counts them.
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
        """Of request `number`, without making it."""
        return (number, self.turns[number].time_s) if self.turns else (self.request.turn, self.request.time_s)

    def at(self, number: int) -> LoggedRequest:
        """Request `number` of the row, from 0."""
        if not self.turns:
            return self.request
        turn = self.turns[number]
        messages = self.request.messages or ()
        following = messages[turn.num_messages] if turn.num_messages < len(messages) else None
        answered = following is not None and following["role"] == "assistant"
        return replace(
            self.request,
            turn=number,
            time_s=turn.time_s,
            messages=messages[: turn.num_messages],
            answer=following["content"] if answered and following is not None else None,
        )
