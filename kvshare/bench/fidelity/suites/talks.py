"""Conversations cut to the size of a scenario: the first sentences of each message."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvshare.replay.requests import Message

LONGEST = {"user": 320, "assistant": 700}  # characters of a message; four are about a token
_BREAK = re.compile(r"(?<=[.!?:;])\s+|\n+")

Talk = tuple[Message, ...]  # a user's message, the assistant's, and so on


def talk_of(chat: Sequence[Message]) -> Talk:
    """The chat from its first question up to where two of the same speak in a row or nothing is said."""
    said = [message for message in chat if message["role"] != "system"]
    while said and said[0]["role"] != "user":
        said = said[1:]
    talk: list[Message] = []
    for place, message in enumerate(said):
        role = ("user", "assistant")[place % 2]
        text = shortened(message["content"], LONGEST[role])
        if message["role"] != role or not text:
            break
        talk.append({"role": role, "content": text})
    return tuple(talk)


def shortened(text: str, longest: int) -> str:
    """As many whole sentences or lines as fit, or words where the first sentence is too long."""
    text = text.strip()
    if len(text) <= longest:
        return text
    ends = [match.start() for match in _BREAK.finditer(text, longest // 3, longest + 1)]
    if ends:
        return text[: ends[-1]].rstrip()
    return text[: longest + 1].rsplit(None, 1)[0][:longest]


def sentences(text: str) -> list[str]:
    """The text's sentences and lines, without those that say next to nothing."""
    return [part.strip() for part in _BREAK.split(text) if len(part.strip()) >= 20]
