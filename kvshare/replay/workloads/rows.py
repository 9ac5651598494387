"""
What a workload is written as: JSON lines that `kvshare replay`, `kvshare bench load` and load tools can read.

    {"id": "rag-17",             unique in the file
     "conversation": "rag-c3",   the same in all requests of one
     "turn": 0,                  counts up within the conversation; later ones need not extend earlier ones
     "user": "u5",
     "timestamp": 12.25,         seconds since the first request could have come; never decreases
     "messages": [{"role", "content"}, ...],   the whole body of a chat completion request
     "answer": "..."}            where the source has one

Roles are system, user and assistant: every chat template takes them.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvshare.replay.requests import Message

_REQUESTS_PER_SECOND = 2.0


@dataclass(frozen=True, slots=True)
class Draft:
    """A request before it has its number and its time."""

    conversation: str
    turn: int
    user: str
    messages: tuple[Message, ...]
    answer: str | None = None


@dataclass(frozen=True, slots=True)
class WorkloadRow:
    """One line of the file."""

    id: str
    timestamp: float
    draft: Draft

    def to_json(self) -> str:
        draft = self.draft
        document: dict[str, object] = {
            "id": self.id,
            "conversation": draft.conversation,
            "turn": draft.turn,
            "user": draft.user,
            "timestamp": self.timestamp,
            "messages": [dict(message) for message in draft.messages],
        }
        if draft.answer:
            document["answer"] = draft.answer
        return json.dumps(document, ensure_ascii=False)


def numbered(name: str, drafts: Iterable[Draft], draw: random.Random) -> Iterator[WorkloadRow]:
    """Ids in order, and times as of independent users: exponential gaps."""
    time_s = 0.0
    for number, draft in enumerate(drafts):
        time_s += draw.expovariate(_REQUESTS_PER_SECOND)
        yield WorkloadRow(f"{name}-{number}", round(time_s, 3), draft)


def write_rows(rows: Iterable[WorkloadRow], path: Path) -> int:
    """Returns how many. `-` is stdout; a name in .gz is compressed, the same bytes for the same rows."""
    number = 0
    with _opened(path) as file:
        for row in rows:
            file.write(f"{row.to_json()}\n".encode())
            number += 1
    return number


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    if str(path) == "-":
        yield sys.stdout.buffer
    elif path.suffix == ".gz":
        with path.open("wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as file:
            yield file
    else:
        with path.open("wb") as file:
            yield file
