"""Times of stages by request. Some are known only later, when a device has finished the work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Work that was done for several requests together, and the share of each request."""

    name: str
    begin: Any
    end: Any
    shares: dict[str, float]  # by request


class Times:
    """
    Collects the times of stages by request.

    `seconds`: returns the time between two marks of a device; None while it is not past the second one.
    """

    def __init__(self, seconds: Callable[[Any, Any], float | None]) -> None:
        self._seconds = seconds
        self._pending: list[Stage] = []
        self._known: dict[str, dict[str, float]] = {}
        self._measures: list[tuple[str, Callable[[], Mapping[str, float] | None]]] = []

    def add(self, name: str, begin: Any, end: Any, counts: dict[str, int]) -> None:
        """Add a stage between two marks. Requests share its time by their amounts of work, `counts`."""
        total = sum(counts.values())
        shares = {request_id: count / total if total else 0.0 for request_id, count in counts.items()}
        self._pending.append(Stage(name, begin, end, shares))

    def note(self, request_id: str, seconds: Mapping[str, float]) -> None:
        """Add known times of stages of one request."""
        by_stage = self._known.setdefault(request_id, {}) if seconds else {}
        for stage, value in seconds.items():
            by_stage[stage] = by_stage.get(stage, 0.0) + value

    def note_later(self, request_id: str, measure: Callable[[], Mapping[str, float] | None]) -> None:
        """Add stages of one request whose times are not known yet; until then `measure` returns None."""
        self._measures.append((request_id, measure))

    def take(self) -> dict[str, dict[str, float]]:
        """Return seconds by request and stage: all that became known since the last call."""
        measures, self._measures = self._measures, []
        for request_id, measure in measures:
            if (found := measure()) is None:
                self._measures.append((request_id, measure))
            else:
                self.note(request_id, found)
        waiting = []
        for stage in self._pending:
            seconds = self._seconds(stage.begin, stage.end)
            if seconds is None:
                waiting.append(stage)
                continue
            for request_id, share in stage.shares.items():
                self.note(request_id, {stage.name: seconds * share})
        self._pending = waiting
        known, self._known = self._known, {}
        return known
