"""LMSYS-Chat-1M: `conversation_id`, `conversation` (role, content), `language`; no users, no times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvshare.replay.readers import fields
from kvshare.replay.readers.conversation import conversation_row
from kvshare.replay.readers.row import LoggedRow, Place


def matches(row: Mapping[str, Any]) -> bool:
    return "conversation_id" in row and isinstance(row.get("conversation"), list)


def convert(row: Mapping[str, Any], place: Place) -> Iterator[LoggedRow]:
    messages = fields.messages(row.get("conversation"))
    yield conversation_row(place, messages, language=fields.optional_text(row, "language"))
