"""
WildChat as allenai publishes it, Parquet or JSON lines: `conversation` with one dictionary per message.

Also rows with `messages` in its place, as samples of it are passed on. The user is `hashed_ip`; the older
edition (WildChat, WildChat-nontoxic), which has a `conversation_id` like LMSYS, names none. Published times
are those of the finished answer (of a message, and of the last one for the row): the request was made a
little before, which changes no order within a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvshare.replay.readers import fields
from kvshare.replay.readers.conversation import conversation_row
from kvshare.replay.readers.row import LoggedRow, Place


def matches(row: Mapping[str, Any]) -> bool:
    if "conversation_hash" in row:
        return "conversation" in row or "messages" in row
    is_older = "conversation_id" in row and isinstance(row.get("conversation"), list)
    return is_older and ("timestamp" in row or "detoxify_moderation" in row)  # LMSYS has neither


def convert(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow]:
    said = fields.first(row, "conversation", "messages")
    messages = fields.messages(said)
    yield conversation_row(
        place,
        messages,
        user=_user(row, said),
        times=_times(said, fields.time_s(row.get("timestamp"))),
        language=fields.optional_text(row, "language"),
    )


def _user(row: Mapping[str, Any], said: Sequence[Mapping[str, Any]]) -> str | None:
    return fields.optional_id(row, "hashed_ip") or fields.optional_id(said[0], "hashed_ip")


def _times(said: Sequence[Mapping[str, Any]], row_time_s: float | None) -> list[float | None]:
    """Of every message: its own time, else that of the message after it, else the row's."""
    times: list[float | None] = []
    following = row_time_s
    for message in reversed(said):
        own = fields.time_s(message.get("timestamp"))
        following = following if own is None else own
        times.append(following)
    return times[::-1]
