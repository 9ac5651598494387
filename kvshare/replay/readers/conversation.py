"""A whole conversation -> one request per turn that asks for an answer."""

from __future__ import annotations

from collections.abc import Sequence

from kvshare.replay.readers.row import LoggedRow, Place, Turn
from kvshare.replay.readers.unreadable import Reason, RowError
from kvshare.replay.requests import LoggedRequest, Message


def conversation_row(
    place: Place,
    messages: tuple[Message, ...],
    *,
    user: str | None = None,
    times: Sequence[float | None] = (),
    language: str | None = None,
) -> LoggedRow:
    """
    A request after every user message, and after every tool result that the assistant goes on from.

    `times[i]` is when the request that ends with message i was made. Each row is a conversation of its own:
    data sets repeat their ids, for copies and for slices of one conversation.
    """
    ends = [number for number in range(1, len(messages) + 1) if _asks(messages, number)]
    if not ends:
        raise RowError(Reason.NO_USER_TURN)
    request = LoggedRequest(
        source=place.source,
        line=place.line,
        conversation=place.name,
        user=user,
        messages=messages,
        language=language or "unknown",
    )
    return LoggedRow(request, tuple(Turn(end, times[end - 1] if times else None) for end in ends))


def _asks(messages: Sequence[Message], num_messages: int) -> bool:
    role = messages[num_messages - 1]["role"]
    if role == "tool":
        return num_messages < len(messages) and messages[num_messages]["role"] == "assistant"
    return role == "user"
