"""Times of stages by request, some of which are known only later: a device is past its work after a while."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

# Stages, as `FinishedReport` names them: segments verified by the host, copied and written, placeholders
# computed, KV saved.
VERIFY, WRITE, PASS, SAVE = "verify", "write", "pass", "save"


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Work that was done for several requests together, and each one's share of it."""

    name: str
    begin: Any
    end: Any
    shares: dict[str, float]  # by request


class Times:
    """
    Collects the times of stages by request.

    `seconds`: between two marks of a device, or None while it is not past the second.
    """

    def __init__(self, seconds: Callable[[Any, Any], float | None]) -> None:
        self._seconds = seconds
        self._pending: list[Stage] = []
        self._known: dict[str, dict[str, float]] = {}

    def add(self, name: str, begin: Any, end: Any, counts: dict[str, int]) -> None:
        """A stage between two marks; `counts` is each request's amount of its work."""
        total = sum(counts.values())
        shares = {request_id: count / total if total else 0.0 for request_id, count in counts.items()}
        self._pending.append(Stage(name, begin, end, shares))

    def note(self, request_id: str, seconds: Mapping[str, float]) -> None:
        """Stages of one request with known times."""
        by_stage = self._known.setdefault(request_id, {}) if seconds else {}
        for stage, value in seconds.items():
            by_stage[stage] = by_stage.get(stage, 0.0) + value

    def take(self) -> dict[str, dict[str, float]]:
        """Seconds by request and stage: all that became known since the last call."""
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
