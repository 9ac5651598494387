"""Whole conversations as plain `messages`, most with the assistant's last word; also fine-tuning files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvshare.replay.readers import fields
from kvshare.replay.readers.conversation import conversation_row
from kvshare.replay.readers.row import LoggedRow, Place


def matches(row: Mapping[str, Any]) -> bool:
    said = row.get("messages")
    if not isinstance(said, list) or not said or "turn" in row or "answer" in row:
        return False
    return isinstance(said[-1], Mapping) and said[-1].get("role") == "assistant"


def convert(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow]:
    messages = fields.messages(row.get("messages"))
    time_s = fields.time_s(fields.first(row, "timestamp", "created", "created_at"))
    yield conversation_row(
        place,
        messages,
        user=fields.optional_id(row, "user", "hashed_ip"),
        times=[time_s] * len(messages),
        language=fields.optional_text(row, "language", "lang"),
    )
