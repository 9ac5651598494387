"""
One list with the state of each part of a server: its name, its state, since when, and what to do.

A part is one that requests are served without, or with less of. `PartProblem` has what may be wrong with
each; the owner of a part gives a `PartReading` of it, and `PartHistory` knows since when it has been so.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum, auto

from kvshare.part_problems import PartProblem, PartState

log = logging.getLogger(__name__)


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
    The present state of a part. `problem`: None if it is well.

    `cause`: what the problem's text leaves open, without any text of a prompt. `name`: of a replica;
    `public_name`: for those who may not know its address, where `name` has that.
    """

    part: ServedPart
    problem: PartProblem | None = None
    cause: str = ""
    name: str | None = None
    public_name: str | None = None


@dataclass(frozen=True, slots=True)
class PartStatus:
    """A line of the list. `since`: unix seconds; `public_name`: `name` without what may be an address."""

    part: ServedPart
    name: str | None
    public_name: str | None
    since: float
    problem: PartProblem | None
    cause: str

    @property
    def state(self) -> PartState:
        return PartState.OK if self.problem is None else self.problem.state

    @property
    def label(self) -> str:
        """`replica gpu-1`, or the part's word alone."""
        return str(self.part) if self.name is None else f"{self.part} {self.name}"

    @property
    def detail(self) -> str | None:
        """The problem and its cause, which may name files and addresses; None for a part that is well."""
        if self.problem is None:
            return None
        return f"{self.problem.text}: {self.cause}" if self.cause else self.problem.text


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
        public_name = reading.public_name or reading.name
        now = PartStatus(
            reading.part, reading.name, public_name, self._clock(), reading.problem, reading.cause
        )
        if before is not None and before.state == now.state:
            now = replace(now, since=before.since)
        _log_change(None if before is None else before.problem, now)
        return now


def _log_change(before: PartProblem | None, now: PartStatus) -> None:
    """One warning when it begins, and one line when it is over; a change between two problems is none."""
    problem = now.problem
    if before is None and problem is not None and problem.is_logged:
        log.warning("%s: %s. %s", now.label, now.detail, problem.remedy)
    elif before is not None and problem is None and before.is_logged:
        log.warning("%s: it is well again", now.label)


def in_words(parts: Iterable[PartStatus]) -> str:
    """Say in one line what is wrong with the parts that are not well; empty if all are well."""
    return "; ".join(
        f"replica {each.public_name}: {each.problem.text}" if each.public_name else each.problem.text
        for each in parts
        if each.problem is not None
    )
