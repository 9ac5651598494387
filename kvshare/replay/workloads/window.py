"""`window`: chats that have outgrown what is sent; whole turns fall off the front, so everything shifts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from kvshare.replay.requests import Message
from kvshare.replay.stream import take_turns
from kvshare.replay.workloads.resubmit import reworded
from kvshare.replay.workloads.rows import Draft
from kvshare.replay.workloads.sources import chats

SYSTEM = {"role": "system", "content": "You are a helpful assistant. Answer in the language of the user."}
_NUM_OPEN = 8
_REWORDED = 0.5  # of the questions
_MIN_TURNS = 4
_SMALLEST, _LARGEST = 3000, 9000  # characters that a client sends, at most


def drafts(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[Draft]:
    """
    Several chats at a time, from the turn on that fills the window. Once all are through, they come again
    with other window sizes and with some questions reworded, as chats of other users.
    """
    usable = [chat for chat in chats(paths) if _num_turns(chat) >= _MIN_TURNS]
    long = [chat for chat in usable if _num_chars(chat) > _SMALLEST]
    if not long:
        return
    yield from take_turns(_opened(long, draw), _NUM_OPEN, draw)


def _opened(chats: Sequence[tuple[Message, ...]], draw: random.Random) -> Iterator[Iterator[Draft]]:
    numbers = count()
    while True:
        for chat in draw.sample(chats, len(chats)):
            opened = next(numbers)
            chat = chat if opened < len(chats) else _another(chat, draw)
            size = draw.randint(_SMALLEST, min(_LARGEST, max(_SMALLEST, int(_num_chars(chat) * 0.7))))
            yield _turns(f"window-c{opened}", f"u{opened}", chat, size)


def _turns(conversation: str, user: str, chat: Sequence[Message], size: int) -> Iterator[Draft]:
    turn = 0
    for number, message in enumerate(chat):
        if message["role"] == "user":
            answer = chat[number + 1]["content"] if number + 1 < len(chat) else None
            if _num_chars(chat[: number + 2]) > size:
                yield Draft(conversation, turn, user, (SYSTEM, *kept(chat[: number + 1], size)), answer)
                turn += 1


def _another(chat: Sequence[Message], draw: random.Random) -> tuple[Message, ...]:
    return tuple(
        {"role": "user", "content": reworded(message["content"], draw)}
        if message["role"] == "user" and draw.random() < _REWORDED
        else message
        for message in chat
    )


def kept(history: Sequence[Message], size: int) -> tuple[Message, ...]:
    """The newest messages that fit, from a user's on; at least the last question."""
    messages = [message for message in history if message["role"] != "system"]
    while len(messages) > 1 and (_num_chars(messages) > size or messages[0]["role"] != "user"):
        messages = messages[1:]
    return tuple(messages)


def _num_turns(chat: Sequence[Message]) -> int:
    return sum(message["role"] == "user" for message in chat)


def _num_chars(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)
