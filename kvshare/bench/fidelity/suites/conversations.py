"""Conversations cut to the size of a scenario: the first sentences of each message."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import cycle, dropwhile

from kvshare.replay.requests import Message

_LONGEST = {"user": 320, "assistant": 700}  # characters of a message; a token has about four
_BREAK = re.compile(r"(?<=[.!?:;])\s+|\n+")

Conversation = tuple[Message, ...]  # a user's message, the assistant's, and so on


def in_turns(texts: Iterable[str]) -> Conversation:
    """Messages of the user and of the assistant in turns."""
    both = zip(cycle(_LONGEST), texts, strict=False)
    return tuple({"role": role, "content": text} for role, text in both)


def conversation_of(chat: Sequence[Message]) -> Conversation:
    """The chat from its first question until one role speaks twice in a row or a message is empty."""
    spoken = (message for message in chat if message["role"] != "system")
    said = dropwhile(lambda message: message["role"] != "user", spoken)
    texts = []
    for (role, longest), message in zip(cycle(_LONGEST.items()), said, strict=False):
        text = shortened(message["content"], longest)
        if message["role"] != role or not text:
            break
        texts.append(text)
    return in_turns(texts)


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
    """The text's sentences and lines of at least 20 characters."""
    return [part.strip() for part in _BREAK.split(text) if len(part.strip()) >= 20]
