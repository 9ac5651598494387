"""
`agent`: the same tasks run again and again; each step appends a tool's result, and results change a little.

A request is the whole transcript so far. Runs of one task have the same steps in the same order, but every
result says when it was fetched and how long that took, and now and then a figure in it has changed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from kvshare.replay.requests import Message
from kvshare.replay.stream import take_turns
from kvshare.replay.workloads import values
from kvshare.replay.workloads.rows import Draft
from kvshare.replay.workloads.sources import Passage, bare_passages, questions

_SYSTEM = """You are an agent that works for the user until the task is done. You have three tools.

search(query): look in the collection; returns titles and how well they fit.
open(title): return the text of one document, with the time at which it was fetched.
note(text): write something down; notes are kept until the end of the task.

In every step, think about what is known and what is missing, then call exactly one tool. Write the call \
alone on the last line. A result may be out of date or wrong: where two results contradict each other, the \
one that was fetched later counts. Never make up a result. When nothing is missing, write "Done:" and the \
answer in one sentence. Do not ask the user anything before that. Do not open a document twice in a row."""
_STEPS = 5
_RUNS = 6  # of a task, on average
_NUM_OPEN = 4
_NUM_USERS = 7
_LONGEST = 2500  # characters of a result
_NUMBER = re.compile(r"(?<![\w.,])\d{2,6}(?![\w.,])")
_CHANGES = 0.3  # of the results, from one run to the next


@dataclass(frozen=True, slots=True)
class _Task:
    goal: str
    documents: tuple[Passage, ...]


def drafts(paths: Sequence[Path], num_requests: int, draw: random.Random) -> Iterator[Draft]:
    """A few runs at a time, each from its first step to its last."""
    tasks = _tasks(paths, draw)
    if not tasks:
        return
    used = draw.sample(tasks, min(len(tasks), max(2, num_requests // (_RUNS * _STEPS))))
    runs = (_run(draw.choice(used), f"agent-c{n}", f"u{n % _NUM_USERS}", draw) for n in count())
    yield from take_turns(runs, _NUM_OPEN, draw)


def _run(task: _Task, conversation: str, user: str, draw: random.Random) -> Iterator[Draft]:
    messages: list[Message] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"Task: {task.goal}"},
    ]
    for turn, document in enumerate(task.documents):
        call = f"I do not know enough yet, so I look at the next source.\nopen({_name(document)!r})"
        yield Draft(conversation, turn, user, tuple(messages), call)
        messages += [
            {"role": "assistant", "content": call},
            {"role": "user", "content": _result(document, draw)},
        ]
    yield Draft(conversation, len(task.documents), user, tuple(messages))


def _result(document: Passage, draw: random.Random) -> str:
    text = document.text[:_LONGEST]
    if draw.random() < _CHANGES:
        text = _NUMBER.sub(lambda match: _near(match.group(), draw), text, count=2)
    fetched = f"{values.date(draw)} {values.clock(draw)}"
    return f"Result of open({_name(document)!r}), fetched {fetched} in {draw.randint(3, 900)} ms:\n\n{text}"


def _name(document: Passage) -> str:
    return document.title or " ".join(document.text.split()[:6])


def _near(number: str, draw: random.Random) -> str:
    return str(int(number) + draw.randint(1, 9))


def _tasks(paths: Sequence[Path], draw: random.Random) -> list[_Task]:
    """A question with passages is a task; bare passages are dealt out, five to a task."""
    tasks = [_Task(f"Find out: {question.text}", question.passages[:_STEPS]) for question in questions(paths)]
    passages = bare_passages(paths)
    draw.shuffle(passages)
    for start in range(0, len(passages) - _STEPS + 1, _STEPS):
        dealt = tuple(passages[start : start + _STEPS])
        titles = ", ".join(_name(passage) for passage in dealt[:2])
        tasks.append(
            _Task(f"Write one paragraph on what these have in common, beginning with {titles}.", dealt)
        )
    return tasks
