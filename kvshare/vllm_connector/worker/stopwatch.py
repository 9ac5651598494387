"""
Times of work on a device. A GPU works asynchronously, so the host's clock would only time the launches.

    CPU    marks are times of the host's clock
    CUDA   marks are events in the stream; their times are known when the device has reached them
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

Mark = TypeVar("Mark")


class Stopwatch(Protocol[Mark]):
    def mark(self) -> Mark:
        """The current point in the order of work on the device."""

    def seconds(self, begin: Mark, end: Mark) -> float | None:
        """Between two marks; None while the device has not reached the second."""


class HostStopwatch:
    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float | None:
        return end - begin


class CudaStopwatch:
    """Not run on a GPU yet: tested with stand-ins for events."""

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        return begin.elapsed_time(end) / 1000 if end.query() else None


def stopwatch_of(device: torch.device) -> Stopwatch[Any]:
    return CudaStopwatch() if device.type == "cuda" else HostStopwatch()


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Work that was done for several requests together, and each one's share of it."""

    name: str
    begin: Any
    end: Any
    shares: dict[str, float]  # by request


class Times:
    """Collects the times of stages by request, some of which are known only later."""

    def __init__(self, stopwatch: Stopwatch[Any]) -> None:
        self._stopwatch = stopwatch
        self._pending: list[Stage] = []
        self._known: dict[str, dict[str, float]] = {}

    def mark(self) -> Any:
        return self._stopwatch.mark()

    def add(self, name: str, begin: Any, end: Any, counts: dict[str, int]) -> None:
        """A stage between two marks; `counts` is each request's amount of its work."""
        total = sum(counts.values())
        shares = {request_id: count / total if total else 0.0 for request_id, count in counts.items()}
        self._pending.append(Stage(name, begin, end, shares))

    def note(self, request_id: str, seconds: Mapping[str, float]) -> None:
        """Stages of one request with known times."""
        own = self._known.setdefault(request_id, {}) if seconds else {}
        for stage, value in seconds.items():
            own[stage] = own.get(stage, 0.0) + value

    def take(self) -> dict[str, dict[str, float]]:
        """Seconds by request and stage: all that became known since the last call."""
        waiting = []
        for stage in self._pending:
            seconds = self._stopwatch.seconds(stage.begin, stage.end)
            if seconds is None:
                waiting.append(stage)
                continue
            for request_id, share in stage.shares.items():
                self.note(request_id, {stage.name: seconds * share})
        self._pending = waiting
        known, self._known = self._known, {}
        return known
