"""
Streams for which sharing pays, made from real text with a seed: `kvshare workload NAME`.

    template   forms with slots in the middle, filled with different values
    header     date, user name and tool list on top of a long shared system prompt
    window     long chats whose oldest turns are dropped from the front
    resubmit   an earlier turn edited and sent again
    rag        documents of question sets, retrieved in another order and with other documents
    agent      growing tool transcripts, run again with changed results
    revise     a text that is changed in one place and asked about again, forty times

Each takes text from the user's files, or from a small sample in samples/ that was written for this purpose.
Equal files, number of requests and seed give equal rows. They are JSON lines for `kvshare replay`, `kvshare
bench load` and load tools; `WorkloadRow` has their keys. Roles are system, user and assistant, which every
chat template takes.
"""

import gzip
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import IO, cast

from kvshare.errors import LogError
from kvshare.replay.workloads import chats, documents, forms
from kvshare.replay.workloads.sources import WORDS, WorkloadRow

__all__ = ["SAMPLES", "WORKLOADS", "WorkloadRow", "generate", "write_rows"]

SAMPLES = Path(__file__).parent / "samples"
_REQUESTS_PER_SECOND = 2.0

# Each makes endless rows from source files; `sources` in words.yaml says which rows of them it can use.
WORKLOADS: Mapping[str, Callable[[Sequence[Path], int, random.Random], Iterator[WorkloadRow]]] = {
    "template": forms.template,
    "header": forms.header,
    "window": chats.window,
    "resubmit": chats.resubmit,
    "rag": documents.rag,
    "agent": documents.agent,
    "revise": documents.revise,
}


def generate(
    name: str, sources: Sequence[Path] = (), *, num_requests: int, seed: int
) -> Iterator[WorkloadRow]:
    """
    Return the rows of a workload, made from `sources` or else from its own sample.

    Raises LogError for an unknown workload, or if nothing in the sources is usable.
    """
    if name not in WORKLOADS:
        raise LogError(f"unknown workload {name!r}; expected one of {', '.join(WORKLOADS)}")
    usable = WORDS["sources"][name]
    draw = random.Random(f"{name}:{seed}")
    drafts = WORKLOADS[name](sources or [SAMPLES / usable["sample"]], num_requests, draw)
    first = next(drafts, None)
    if first is None:
        names = ", ".join(path.name for path in sources)
        raise LogError(f"{names}: nothing is usable for {name!r}, which needs {usable['wants']}")
    drafts = islice(chain([first], drafts), num_requests)
    return _numbered(name, drafts, random.Random(f"{name}:{seed}:times"))


def _numbered(name: str, drafts: Iterable[WorkloadRow], draw: random.Random) -> Iterator[WorkloadRow]:
    """Ids in order, and times with exponential gaps, as of independent users."""
    time_s = 0.0
    for number, draft in enumerate(drafts):
        time_s += draw.expovariate(_REQUESTS_PER_SECOND)
        yield replace(draft, id=f"{name}-{number}", timestamp=round(time_s, 3))


def write_rows(rows: Iterable[WorkloadRow], path: Path) -> int:
    """Returns the number of rows. `-`: stdout; .gz: compressed, equal bytes for equal rows."""
    number = 0
    with ExitStack() as stack:
        to_stdout = str(path) == "-"
        file: IO[bytes] = sys.stdout.buffer if to_stdout else stack.enter_context(path.open("wb"))
        if path.suffix == ".gz":
            packed = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0)
            file = cast(IO[bytes], stack.enter_context(packed))
        for row in rows:
            file.write(f"{row.to_json()}\n".encode())
            number += 1
    return number
