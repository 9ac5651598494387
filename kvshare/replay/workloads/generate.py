"""
The workloads by name, the one way to make any of them, and what they are written as.

JSON lines that `kvshare replay`, `kvshare bench load` and load tools can read:

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO

from kvshare.errors import LogError
from kvshare.replay.workloads import chats, documents, forms
from kvshare.replay.workloads.sources import Draft

_SAMPLES = Path(__file__).parent / "samples"
_REQUESTS_PER_SECOND = 2.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Endless drafts from source files. `wants` says which rows of them it can use."""

    name: str
    wants: str
    sample: str
    drafts: Callable[[Sequence[Path], int, random.Random], Iterator[Draft]]


WORKLOADS: Mapping[str, Workload] = {
    each.name: each
    for each in (
        Workload(
            "template",
            "texts with slots, as in ${name:default}, {{name}}, [NAME] or '– bitte wählen –'",
            "templates.jsonl",
            forms.template,
        ),
        Workload(
            "header",
            "long `prompt` texts for the system prompt, and short ones, or any log, for the questions",
            "assistants.jsonl",
            forms.header,
        ),
        Workload(
            "window",
            "conversations of many turns, in any format of logs",
            "chats.jsonl",
            chats.window,
        ),
        Workload(
            "resubmit",
            "conversations, in any format of logs",
            "chats.jsonl",
            chats.resubmit,
        ),
        Workload(
            "rag",
            "questions with passages (`ctxs`, `context` or `paragraphs`), or bare passages beside them",
            "questions.jsonl",
            documents.rag,
        ),
        Workload(
            "agent",
            "texts or passages for the tools to return",
            "tool_results.jsonl",
            documents.agent,
        ),
    )
}


def generate(
    name: str, sources: Sequence[Path] = (), *, num_requests: int, seed: int
) -> Iterator[WorkloadRow]:
    """
    The rows of a workload; from its own sample where no source is given.

    Raises LogError if there is no such workload, or nothing in the sources that it can use.
    """
    if name not in WORKLOADS:
        raise LogError(f"no workload {name!r}; there are {', '.join(WORKLOADS)}")
    workload = WORKLOADS[name]
    draw = random.Random(f"{name}:{seed}")
    drafts = workload.drafts(sources or [_SAMPLES / workload.sample], num_requests, draw)
    first = next(drafts, None)
    if first is None:
        names = ", ".join(path.name for path in sources)
        raise LogError(f"{names}: nothing that {name!r} can use; it wants {workload.wants}")
    drafts = islice(chain([first], drafts), num_requests)
    return _numbered(name, drafts, random.Random(f"{name}:{seed}:times"))


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


def _numbered(name: str, drafts: Iterable[Draft], draw: random.Random) -> Iterator[WorkloadRow]:
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
