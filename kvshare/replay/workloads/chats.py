"""`window` and `resubmit`: real conversations whose beginning is dropped, or an earlier turn changed."""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvshare.logs.requests import Message
from kvshare.replay.stream import take_turns
from kvshare.replay.workloads import sources
from kvshare.replay.workloads.sources import WorkloadRow

_SYSTEM = {"role": "system", "content": sources.WORDS["window_system"]}
_NUM_OPEN = 8
_REWORDED = 0.5  # of the questions
_MIN_TURNS = 4
_SMALLEST, _LARGEST = 3000, 9000  # characters that a client sends, at most
_LONGEST = 16_000  # characters of a prompt
_SHORTEST = 800
_MOST_EDITS = 3


def window(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[WorkloadRow]:
    """
    Chats that are longer than what is sent: whole turns are dropped from the front, so that everything
    shifts.

    Several chats at a time, from the turn that fills the window. After the last chat they start again with
    other window sizes and some questions reworded, as chats of other users.
    """
    long = [
        chat
        for chat in sources.chats(paths)
        if sum(message["role"] == "user" for message in chat) >= _MIN_TURNS and num_chars(chat) > _SMALLEST
    ]
    yield from take_turns(_opened(long, draw), _NUM_OPEN, draw)


def _opened(chats: Sequence[tuple[Message, ...]], draw: random.Random) -> Iterator[Iterator[WorkloadRow]]:
    for opened, chat in enumerate(sources.endless(chats, draw)):
        chat = chat if opened < len(chats) else _another(chat, draw)
        size = draw.randint(_SMALLEST, min(_LARGEST, max(_SMALLEST, int(num_chars(chat) * 0.7))))
        yield _turns(f"window-c{opened}", f"u{opened}", chat, size)


def _turns(conversation: str, user: str, chat: Sequence[Message], size: int) -> Iterator[WorkloadRow]:
    turn = 0
    for number, message in enumerate(chat):
        if message["role"] == "user":
            answer = chat[number + 1]["content"] if number + 1 < len(chat) else None
            if num_chars(chat[: number + 2]) > size:
                messages = (_SYSTEM, *kept(chat[: number + 1], size))
                yield WorkloadRow(conversation, turn, user, messages, answer)
                turn += 1


def _another(chat: Sequence[Message], draw: random.Random) -> tuple[Message, ...]:
    return tuple(
        {"role": "user", "content": reworded(message["content"], draw)}
        if message["role"] == "user" and draw.random() < _REWORDED
        else message
        for message in chat
    )


def kept(history: Sequence[Message], size: int) -> tuple[Message, ...]:
    """Return the newest messages that fit, from a user's on; at least the last question."""
    messages = [message for message in history if message["role"] != "system"]
    while len(messages) > 1 and (num_chars(messages) > size or messages[0]["role"] != "user"):
        messages = messages[1:]
    return tuple(messages)


def num_chars(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) for message in messages)


def resubmit(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[WorkloadRow]:
    """
    Yield chats, and each again, one to three times, after its user changed a few words of an earlier turn.

    Half of the time the messages after the edited turn are dropped, as in chat clients; half of the time
    they stay and only the beginning has changed, as in a playground or a notebook.
    """
    talks = [chat for chat in sources.chats(paths) if _ends(chat)]
    for number, chat in enumerate(sources.endless(talks, draw)):
        prompt = tuple(chat[: draw.choice(_ends(chat))])
        conversation, user = f"resubmit-c{number}", f"u{number}"
        yield WorkloadRow(conversation, 0, user, prompt)
        for turn in range(1, 1 + draw.randint(1, _MOST_EDITS)):
            prompt = edited(prompt, draw)
            yield WorkloadRow(conversation, turn, user, prompt)


def edited(prompt: Sequence[Message], draw: random.Random) -> tuple[Message, ...]:
    """Return the chat with one user turn changed, and with or without the messages after it."""
    asked = [place for place, message in enumerate(prompt) if message["role"] == "user"]
    place = draw.choice(asked)
    changed = {"role": "user", "content": reworded(prompt[place]["content"], draw)}
    rest = prompt[place + 1 :] if draw.random() < 0.5 else ()
    return (*prompt[:place], changed, *rest)


def reworded(text: str, draw: random.Random) -> str:
    """Return the text with one word replaced; if it has no spaces, with a few characters inserted."""
    words = text.split(" ")
    if len(words) < 4:
        place = draw.randint(0, len(text))
        return f"{text[:place]} {draw.choice(sources.TOPICS)} {text[place:]}"
    place = draw.randrange(len(words))
    words[place] = str(draw.randint(2, 999)) if words[place].isdigit() else draw.choice(sources.TOPICS)
    return " ".join(words)


def _ends(chat: Sequence[Message]) -> list[int]:
    """The ends of prompts that are neither too short nor too long, each after a question."""
    ends, length = [], 0
    for number, message in enumerate(chat):
        length += len(message["content"])
        if message["role"] == "user" and _SHORTEST <= length <= _LONGEST:
            ends.append(number + 1)
    return ends
