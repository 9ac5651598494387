"""How the start of a worker runs checks that return a problem or None."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class StartCheck(Protocol):
    def check(self) -> str | None: ...


def first_problem(checks: Iterable[StartCheck]) -> str | None:
    """Return the first problem, or None. Each check is of one part of the cache."""
    problems = (each.check() for each in checks)
    return next((problem for problem in problems if problem is not None), None)


def tried(check: Callable[[], str | None], what: str) -> str | None:
    """Return the same for a check of what sharing can do without: an error is a problem, too."""
    try:
        return check()
    except Exception as exc:  # noqa: BLE001  its message becomes a warning
        return f"{what} raised an error: {type(exc).__name__}: {exc}"
