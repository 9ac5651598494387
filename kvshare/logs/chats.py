"""
Whole conversations, one a row: WildChat, LMSYS-Chat-1M, ShareGPT, and plain `messages`.

A row becomes a request for each turn that asks for an answer. Each row is a conversation of its own, because
data sets repeat ids, for copies and for parts of one conversation.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvshare.logs import fields
from kvshare.logs.files import Row
from kvshare.logs.names import TIME
from kvshare.logs.requests import LoggedRequest, Message
from kvshare.logs.rows import LoggedRow, RowError, RowFault, Turn

Times = Sequence[float | None]  # of messages


def is_wildchat(row: Row) -> bool:
    if "conversation_hash" in row:
        return "conversation" in row or "messages" in row
    return is_lmsys(row) and ("timestamp" in row or "detoxify_moderation" in row)  # LMSYS has neither


def read_wildchat(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow]:
    """
    As allenai publishes it: `conversation` with one dictionary per message; samples have `messages`.

    The user is `hashed_ip`; the older edition (WildChat, WildChat-nontoxic) has a `conversation_id` like
    LMSYS and no users. Published times are those of finished answers, a little after the requests; this
    changes no order within a conversation.
    """
    said = fields.first(row, "conversation", "messages")
    messages = fields.messages(said)
    user = fields.optional_id(row, "hashed_ip") or fields.optional_id(said[0], "hashed_ip")
    times = _times(said, fields.time_s(row.get("timestamp")))
    yield _conversation(row, blank, messages, user=user, times=times)


def is_lmsys(row: Row) -> bool:
    return "conversation_id" in row and isinstance(row.get("conversation"), list)


def read_lmsys(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow]:
    """`conversation` (role, content), `language`; no users, no times."""
    yield _conversation(row, blank, fields.messages(row.get("conversation")))


def read_sharegpt(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow]:
    """`conversations` with `from` and `value`, one JSON array or JSON lines. No users, no times."""
    yield _conversation(row, blank, fields.messages(row.get("conversations"), role="from", content="value"))


def is_conversation(row: Row) -> bool:
    said = row.get("messages")
    if not isinstance(said, list) or not said or "turn" in row or "answer" in row:
        return False
    return isinstance(said[-1], Mapping) and said[-1].get("role") == "assistant"


def read_conversation(row: Row, blank: LoggedRequest) -> Iterator[LoggedRow]:
    """Plain `messages` that end with the assistant; also fine-tuning files."""
    messages = fields.messages(row.get("messages"))
    time_s = fields.time_s(fields.first(row, *TIME))
    user = fields.optional_id(row, "user", "hashed_ip")
    yield _conversation(row, blank, messages, user=user, times=[time_s] * len(messages))


def _conversation(
    row: Row, blank: LoggedRequest, messages: tuple[Message, ...], user: str | None = None, times: Times = ()
) -> LoggedRow:
    """
    Return a request after every user message, and after every tool result that the assistant goes on from.

    `times[i]` is when the request that ends with message i was made.
    """
    ends = [number for number in range(1, len(messages) + 1) if _asks(messages, number)]
    if not ends:
        raise RowError(RowFault.NO_USER_TURN)
    request = replace(blank, user=user, messages=messages, language=fields.language(row))
    return LoggedRow(request, tuple(Turn(end, times[end - 1] if times else None) for end in ends))


def _asks(messages: Sequence[Message], num_messages: int) -> bool:
    role = messages[num_messages - 1]["role"]
    if role == "tool":
        return num_messages < len(messages) and messages[num_messages]["role"] == "assistant"
    return role == "user"


def _times(said: Sequence[Mapping[str, Any]], row_time_s: float | None) -> Times:
    """Return a time for every message: its own, else that of the message after it, else the row's."""
    times: list[float | None] = []
    following = row_time_s
    for message in reversed(said):
        own = fields.time_s(message.get("timestamp"))
        following = following if own is None else own
        times.append(following)
    return times[::-1]
