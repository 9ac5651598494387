"""ShareGPT: `conversations` with `from` and `value`, one JSON array or JSON lines. No users, no times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvshare.replay.readers import fields
from kvshare.replay.readers.conversation import conversation_row
from kvshare.replay.readers.row import LoggedRow, Place


def matches(row: Mapping[str, Any]) -> bool:
    return "conversations" in row


def convert(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow]:
    messages = fields.messages(row.get("conversations"), role="from", content="value")
    yield conversation_row(place, messages, language=fields.optional_text(row, "language", "lang"))
