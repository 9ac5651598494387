"""The workloads by name, and the one way to make any of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kvshare.errors import LogError
from kvshare.replay.workloads import agent, header, rag, resubmit, template, window
from kvshare.replay.workloads.rows import Draft, WorkloadRow, numbered

_SAMPLES = Path(__file__).parent / "samples"


@dataclass(frozen=True, slots=True)
class Workload:
    """Endless drafts from source files. `wants` says which rows of them it can use."""

    name: str
    what: str
    wants: str
    sample: str
    drafts: Callable[[Sequence[Path], int, random.Random], Iterator[Draft]]


WORKLOADS: Mapping[str, Workload] = {
    each.name: each
    for each in (
        Workload(
            "template",
            "forms with slots in the middle, filled with different values",
            "texts with slots, as in ${name:default}, {{name}}, [NAME] or '– bitte wählen –'",
            "templates.jsonl",
            template.drafts,
        ),
        Workload(
            "header",
            "date, user name and tool list on top of a long shared system prompt",
            "long `prompt` texts for the system prompt, and short ones, or any log, for the questions",
            "assistants.jsonl",
            header.drafts,
        ),
        Workload(
            "window",
            "long chats whose oldest turns are dropped from the front",
            "conversations of many turns, in any format of logs",
            "chats.jsonl",
            window.drafts,
        ),
        Workload(
            "resubmit",
            "an earlier turn edited and sent again",
            "conversations, in any format of logs",
            "chats.jsonl",
            resubmit.drafts,
        ),
        Workload(
            "rag",
            "documents retrieved in another order and company",
            "questions with passages (`ctxs`, `context` or `paragraphs`), or bare passages beside them",
            "questions.jsonl",
            rag.drafts,
        ),
        Workload(
            "agent",
            "growing tool transcripts, run again with changed results",
            "texts or passages for the tools to return",
            "tool_results.jsonl",
            agent.drafts,
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
    return numbered(name, _all(first, drafts, num_requests), random.Random(f"{name}:{seed}:times"))


def _all(first: Draft, rest: Iterator[Draft], num_requests: int) -> Iterator[Draft]:
    yield first
    yield from islice(rest, max(0, num_requests - 1))
