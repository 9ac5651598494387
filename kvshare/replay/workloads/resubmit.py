"""
`resubmit`: somebody goes back to an earlier turn, changes a few words of it and sends again.

As chat clients do it: half of the time what came after the edited turn is dropped and the talk goes on from
there; half of the time the rest stays and only its beginning has changed, as in a playground or a notebook.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvshare.replay.requests import Message
from kvshare.replay.workloads import values
from kvshare.replay.workloads.rows import Draft
from kvshare.replay.workloads.sources import chats

_LONGEST = 16_000  # characters of a prompt
_SHORTEST = 800
_MOST_EDITS = 3


def drafts(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[Draft]:
    """Per conversation: the request as it was, then one to three edits of it."""
    talks = [chat for chat in chats(paths) if _ends(chat)]
    if not talks:
        return
    number = 0
    while True:
        for chat in draw.sample(talks, len(talks)):
            prompt = tuple(chat[: draw.choice(_ends(chat))])
            conversation, user = f"resubmit-c{number}", f"u{number}"
            number += 1
            yield Draft(conversation, 0, user, prompt)
            for turn in range(1, 1 + draw.randint(1, _MOST_EDITS)):
                prompt = edited(prompt, draw)
                yield Draft(conversation, turn, user, prompt)


def edited(prompt: Sequence[Message], draw: random.Random) -> tuple[Message, ...]:
    """One user turn changed in its middle, and what came after it dropped or kept."""
    asked = [place for place, message in enumerate(prompt) if message["role"] == "user"]
    place = draw.choice(asked)
    changed = {"role": "user", "content": reworded(prompt[place]["content"], draw)}
    rest = prompt[place + 1 :] if draw.random() < 0.5 else ()
    return (*prompt[:place], changed, *rest)


def reworded(text: str, draw: random.Random) -> str:
    """Another word in the place of one; in a text without spaces, a few characters put in."""
    words = text.split(" ")
    if len(words) < 4:
        place = draw.randint(0, len(text))
        return f"{text[:place]} {draw.choice(values.TOPICS)} {text[place:]}"
    place = draw.randrange(len(words))
    words[place] = str(draw.randint(2, 999)) if words[place].isdigit() else draw.choice(values.TOPICS)
    return " ".join(words)


def _ends(chat: Sequence[Message]) -> list[int]:
    """Behind which questions a prompt may end that is neither too short nor too long."""
    ends, length = [], 0
    for number, message in enumerate(chat):
        length += len(message["content"])
        if message["role"] == "user" and _SHORTEST <= length <= _LONGEST:
            ends.append(number + 1)
    return ends
