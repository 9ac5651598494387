"""
A time limit and a circuit breaker around the calls of one part, so that a failing or slow one costs little.

    closed     calls go through; after several failures in a row -> open
    open       calls fail at once, for free; after `open_s` -> half open
    half open  one trial call goes through, others fail as if open; it works -> closed, it fails -> open

A call that blocks the event loop, as a search of an index in this process does, cannot be cancelled. It
counts as late afterwards: so a slow index delays a few requests and not all of them.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from vector_index.errors import IndexPausedError, VectorIndexError

log = logging.getLogger(__name__)

T = TypeVar("T")


_INDEX_REMEDY = "look at the Qdrant server where index.backend is server, or restart this one"
_EMBEDDER_REMEDY = "set index.dense: false, or restart this server"
# By part of an index, for the log: the setting of its limit of time, and what to do if it fails.
_PARTS = {
    "fingerprint": ("index.search_timeout_s", _INDEX_REMEDY),
    "embedder": ("index.embed_timeout_s", _EMBEDDER_REMEDY),
    "embedding": ("index.search_timeout_s", _INDEX_REMEDY),
    "indexing": (None, _INDEX_REMEDY),
    "index_embedder": (None, _EMBEDDER_REMEDY),
}


class CircuitState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class FailureReason(StrEnum):
    CIRCUIT_OPEN = "circuit_open"
    TIMEOUT = "timeout"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Failure:
    """A part that did not contribute, and why; `detail` for the log has no text or tokens of any prompt."""

    component: str
    reason: FailureReason
    detail: str = field(default="", compare=False)


class Circuit:
    """Guards one component, used from one event loop. `clock` gives seconds, monotonic."""

    def __init__(
        self,
        component: str,
        *,
        failures_to_open: int,
        open_s: float,
        time_limit: str | None = None,
        remedy: str = "restart this server",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """For the log: `time_limit` is the setting of it, if there is one; `remedy` is for errors."""
        self.component = component
        self._time_limit = time_limit
        self._remedy = remedy
        self._failures_to_open = failures_to_open
        self._open_s = open_s
        self._clock = clock
        self._in_a_row = 0
        self._late_in_a_row = 0  # of these
        self._next_trial_at = 0.0
        self._last_failure = ""

    @property
    def state(self) -> CircuitState:
        """Return the state that the next call meets."""
        if self._in_a_row < self._failures_to_open:
            return CircuitState.CLOSED
        return CircuitState.OPEN if self._clock() < self._next_trial_at else CircuitState.HALF_OPEN

    @property
    def problem(self) -> str | None:
        """Return what went wrong last, while calls do not go through; None while they do."""
        return None if self.state is CircuitState.CLOSED else self._last_failure

    async def attempt(self, call: Callable[[], Awaitable[T]], *, timeout_s: float) -> T | Failure:
        """
        Return what `call` returns, or a Failure if it raises, takes too long, or the circuit is open.

        Cancellation from outside passes through, and IndexPausedError, which is not a failure.
        """
        state = self.state
        if state is CircuitState.OPEN:
            return Failure(self.component, FailureReason.CIRCUIT_OPEN)
        if state is CircuitState.HALF_OPEN:
            # Others stay out until this trial call is decided, or for another `open_s` if it is cancelled.
            self._next_trial_at = self._clock() + self._open_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result = await call()
            deadline = limit.when()
            if deadline is not None and asyncio.get_running_loop().time() > deadline:
                raise TimeoutError
        except IndexPausedError:
            raise
        except TimeoutError:
            return self._failed(FailureReason.TIMEOUT, f"no answer within {timeout_s} s")
        except Exception as error:  # noqa: BLE001  logged, without its message
            # Our own messages are written to be logged; others might quote what they choked on.
            places = "".join(traceback.format_tb(error.__traceback__))
            log.debug("%s failed: %s\n%s", self.component, type(error).__name__, places)
            detail = f": {error}" if isinstance(error, VectorIndexError) else ""
            return self._failed(FailureReason.ERROR, type(error).__name__ + detail)
        if self._in_a_row >= self._failures_to_open:
            log.warning("%s of the index works again: prompts are served with it", self.component)
        self._in_a_row = self._late_in_a_row = 0
        return result

    def _failed(self, reason: FailureReason, detail: str) -> Failure:
        self._last_failure = detail
        self._in_a_row += 1
        self._late_in_a_row += reason is FailureReason.TIMEOUT
        if self._in_a_row >= self._failures_to_open:
            self._next_trial_at = self._clock() + self._open_s
        if self._in_a_row == self._failures_to_open:
            self._log_opened(detail)
        return Failure(self.component, reason, detail)

    def _log_opened(self, detail: str) -> None:
        """Log the opening. A late part is busy, as a rule, and not broken."""
        if self._late_in_a_row == self._in_a_row:
            more_time = f", or more time ({self._time_limit})" if self._time_limit else ""
            log.warning(
                "%s of the index was late %d times in a row (%s) and raised no error: as a rule, load. "
                "Prompts are served without it; it is tried again every %g s. If that lasts, give it more "
                "CPU%s",
                *(self.component, self._in_a_row, detail, self._open_s, more_time),
            )
            return
        late = f" ({self._late_in_a_row} of them late)" if self._late_in_a_row else ""
        log.warning(
            "%s of the index failed %d times in a row%s, the last time: %s. Prompts are served without it; "
            "it is tried again every %g s. If that lasts, %s",
            *(self.component, self._in_a_row, late, detail, self._open_s, self._remedy),
        )


def circuits_of_index(
    *, failures_to_open: int, open_s: float, clock: Callable[[], float]
) -> dict[str, Circuit]:
    """Return those of the parts of an index, by their names."""
    return {
        part: Circuit(
            part,
            failures_to_open=failures_to_open,
            open_s=open_s,
            time_limit=time_limit,
            remedy=remedy,
            clock=clock,
        )
        for part, (time_limit, remedy) in _PARTS.items()
    }
