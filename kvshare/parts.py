"""
How each part of a server is, in one list: a word for the part, its state, since when, and what to do.

A part is one that requests are served without, or with less of. parts.yaml has what may be wrong with each;
the owner of a part gives a `PartReading` of it, and `PartHistory` knows since when it has been so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum, auto
from pathlib import Path

from kvshare.tables import read_table

log = logging.getLogger(__name__)


class PartState(StrEnum):
    OK = auto()
    REDUCED = auto()  # it does less than it could
    OFF = auto()  # it does nothing: requests are served without it


class ServedPart(StrEnum):
    """The parts, in the order in which they are listed."""

    SHARING = auto()  # what the operator allows
    MODEL = auto()  # what it lets be shared
    REPLICA = auto()  # a vLLM, by its name
    INDEX = auto()  # of prompts: whether it is open and written
    FINGERPRINT = auto()  # search by fingerprints
    EMBEDDING = auto()  # search by embedding
    EMBEDDER = auto()  # of prompts that are asked
    INDEXING = auto()  # each write of the index
    INDEX_EMBEDDER = auto()  # of prompts that are stored
    BACKLOG = auto()  # prompts that wait to be embedded
    STORE = auto()  # metadata of prompts
    DISK = auto()  # KV on disk, of this process or, by its name, of a replica's vLLM
    CONTROL = auto()  # less is shared where that makes requests slower
    COSTS = auto()  # the file of what was measured
    TENANTS = auto()  # the file of tenants' namespaces
    USAGE = auto()  # the file of what keys have used
    SETTINGS = auto()  # the files that they were read from


@dataclass(frozen=True, slots=True)
class PartReading:
    """
    How a part is now. `kind`: what is wrong with it, one of its rows in parts.yaml; None: nothing.

    `detail`: what the row's text leaves open, without any text of a prompt. `name`: of a replica;
    `public_name`: for those who may not know its address, where `name` has that.
    """

    part: ServedPart
    kind: str | None = None
    detail: str = ""
    name: str | None = None
    public_name: str | None = None


@dataclass(frozen=True, slots=True)
class PartStatus:
    """A line of the list. `since`: unix seconds; `detail`, `remedy`: None for a part that is well."""

    part: ServedPart
    name: str | None
    state: PartState
    since: float
    detail: str | None = None
    remedy: str | None = None
    summary: str | None = None  # `detail` without what may name files and addresses
    public_name: str | None = None  # the same of `name`

    @property
    def label(self) -> str:
        """`replica gpu-1`, or the part's word alone."""
        return str(self.part) if self.name is None else f"{self.part} {self.name}"


@dataclass(frozen=True, slots=True)
class PartProblem:
    """A row of parts.yaml. `is_logged`: here, as its owner does not log when it begins and ends."""

    state: PartState
    text: str
    remedy: str
    is_logged: bool = False


def _table() -> dict[ServedPart, dict[str, PartProblem]]:
    rows = read_table(Path(__file__).with_suffix(".yaml"))
    return {
        ServedPart(part): {kind: PartProblem(PartState(row[0]), *row[1:]) for kind, row in kinds.items()}
        for part, kinds in rows.items()
    }


PROBLEMS = _table()


class PartHistory:
    """Since when each part has been as it is, from one reading to the next. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._known: dict[tuple[ServedPart, str | None], PartStatus] = {}
        self._lock = threading.Lock()

    def seen(self, readings: Iterable[PartReading]) -> tuple[PartStatus, ...]:
        """The list, in the order of `ServedPart`. Logs what begins and ends where the owner does not."""
        order = list(ServedPart)
        with self._lock:
            found = [self._status(reading) for reading in readings]
            self._known = {(each.part, each.name): each for each in found}
        return tuple(sorted(found, key=lambda each: (order.index(each.part), each.name or "")))

    def _status(self, reading: PartReading) -> PartStatus:
        before = self._known.get((reading.part, reading.name))
        problem = None if reading.kind is None else PROBLEMS[reading.part][reading.kind]
        state = PartState.OK if problem is None else problem.state
        since = before.since if before is not None and before.state == state else self._clock()
        public_name = reading.public_name or reading.name
        status = PartStatus(reading.part, reading.name, state, since, public_name=public_name)
        if problem is not None:
            detail, summary = (
                problem.text.format(detail=reading.detail),
                problem.text.partition(": {detail}")[0],
            )
            status = replace(status, detail=detail, remedy=problem.remedy, summary=summary)
        _log_change(before, status, problem)
        return status


def _log_change(before: PartStatus | None, now: PartStatus, problem: PartProblem | None) -> None:
    """One warning when it begins, and one line when it is over; a change between two problems is none."""
    was_ok = before is None or before.state is PartState.OK
    if problem is not None and problem.is_logged and was_ok:
        log.warning("%s: %s. %s", now.label, now.detail, now.remedy)
    elif problem is None and before is not None and not was_ok and _was_logged(before):
        log.warning("%s: it is well again", now.label)


def _was_logged(status: PartStatus) -> bool:
    return any(row.is_logged and row.remedy == status.remedy for row in PROBLEMS[status.part].values())


def in_words(parts: Iterable[PartStatus]) -> str:
    """Say in one line what is wrong with the parts that are not well; empty if all are well."""
    return "; ".join(
        f"replica {each.public_name}: {each.summary}" if each.public_name else str(each.summary)
        for each in parts
        if each.state is not PartState.OK
    )
