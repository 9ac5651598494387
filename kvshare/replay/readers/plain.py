"""
One request per row: `messages` or `prompt` (or `token_ids`), and whatever else a log knows of it.

This is what `kvshare workload` writes. Optional: `conversation` (the same string in all rows of one, in any
file), `turn`, `user`, `timestamp`, `answer`, `language`, `namespace`. Without a `turn`, it is the number of
earlier user messages; that of bare prompts is their place in the conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvshare.replay.readers import fields
from kvshare.replay.readers.row import LoggedRow, Place
from kvshare.replay.readers.unreadable import Reason, RowError
from kvshare.replay.requests import LoggedRequest, Message

_MAX_INT32 = (1 << 31) - 1


def matches(row: Mapping[str, Any]) -> bool:
    return any(name in row for name in ("messages", "prompt", "token_ids"))


def convert(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow]:
    messages: tuple[Message, ...] | None = None
    prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    if row.get("messages") is not None:
        messages = asking(fields.messages(row["messages"]))
    elif row.get("token_ids") is not None:
        token_ids = tokens(row["token_ids"])
    else:
        prompt = full(fields.text(row.get("prompt")))
    conversation = fields.optional_id(row, "conversation", "conversation_id", "session_id")
    turn = fields.optional_count(row, "turn")
    if turn is not None and turn > _MAX_INT32:
        raise RowError(Reason.WRONG_TYPE)
    yield LoggedRow(
        LoggedRequest(
            source=place.source,
            line=place.line,
            conversation=conversation or place.name,
            turn=num_earlier_turns(messages) if turn is None else turn,
            user=fields.optional_id(row, "user", "user_id"),
            time_s=fields.time_s(fields.first(row, "timestamp", "created", "created_at", "time")),
            messages=messages,
            prompt=prompt,
            token_ids=token_ids,
            answer=fields.optional_text(row, "answer", "completion", "response"),
            language=fields.optional_text(row, "language", "lang") or "unknown",
            namespace=fields.optional_id(row, "namespace", "tenant") or "default",
        ),
        turn_by_order=conversation is not None and messages is None and turn is None,
    )


def asking(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The same, if somebody asks in them."""
    if not any(message["role"] in ("user", "tool") for message in messages):
        raise RowError(Reason.NO_USER_TURN)
    return messages


def full(text: str) -> str:
    """The same, if there is any text."""
    if not text.strip():
        raise RowError(Reason.EMPTY)
    return text


def tokens(value: object) -> tuple[int, ...]:
    """Token ids that fit 32 bits."""
    if not isinstance(value, list):
        raise RowError(Reason.WRONG_TYPE)
    ids = tuple(fields.count(token_id) for token_id in value)
    if not ids:
        raise RowError(Reason.EMPTY)
    if max(ids) > _MAX_INT32:
        raise RowError(Reason.WRONG_TYPE)
    return ids


def num_earlier_turns(messages: tuple[Message, ...] | None) -> int:
    """User messages before the last one."""
    return max(0, sum(message["role"] == "user" for message in messages or ()) - 1)
