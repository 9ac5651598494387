"""`header`: one long system prompt for everybody, with today's date, the user and the tools on top."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvshare.replay.workloads import values
from kvshare.replay.workloads.rows import Draft
from kvshare.replay.workloads.sources import texts

_LONG = 1500  # characters: a system prompt
_LONGEST = 8000
_SHORT = 600  # a question
_NUM_SYSTEM_PROMPTS = 3
_TOOLS = {
    "search_web": "Search the web and return the ten best results with their snippets.",
    "read_page": "Fetch a page by its address and return its text.",
    "calculator": "Evaluate an arithmetic expression.",
    "calendar_list": "List the user's appointments between two dates.",
    "calendar_add": "Add an appointment to the user's calendar.",
    "send_mail": "Send an e-mail on behalf of the user, after the user has agreed to the text.",
    "weather": "Return the forecast of a place for the next seven days.",
    "run_python": "Run a short Python program without network and return what it prints.",
    "read_file": "Return the text of a file that the user has uploaded.",
    "translate": "Translate a text into another language.",
}
_QUESTIONS = ("What can you help me with today?", "Summarise what we agreed on last week in three sentences.")


def drafts(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[Draft]:
    """The system prompts are the longest texts of the sources, the questions the short ones."""
    found = texts(paths)
    long = sorted(
        {text for text in found if _LONG <= len(text) <= _LONGEST}, key=lambda text: (-len(text), text)
    )
    if not long:
        return
    questions = sorted({text for text in found if len(text) <= _SHORT}) or list(_QUESTIONS)
    bodies = long[:_NUM_SYSTEM_PROMPTS]
    users = [(f"u{number}", values.person(draw)) for number in range(max(2, num_requests // 4))]
    number = 0
    while True:
        user, name = draw.choice(users)
        system = header(name, draw) + draw.choice(bodies)
        messages = (
            {"role": "system", "content": system},
            {"role": "user", "content": draw.choice(questions)},
        )
        yield Draft(f"header-c{number}", 0, user, messages)
        number += 1


def header(name: str, draw: random.Random) -> str:
    """What stands above the shared part, and differs each time."""
    tools = [
        json.dumps({"name": tool, "description": _TOOLS[tool]})
        for tool in draw.sample(sorted(_TOOLS), draw.randint(2, 6))
    ]
    return (
        f"Current date: {values.date(draw)}, {values.clock(draw)}\n"
        f"User: {name}, {draw.choice(values.PLACES)}\nTools:\n" + "\n".join(tools) + "\n\n"
    )
