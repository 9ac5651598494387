"""
Keeping a failing or slow part out of the way: a time limit and a circuit breaker around a call.

After several failures in a row the circuit opens and calls fail at once, for free. After a while
one call is let through; if it works the circuit closes, else it stays open for another while.

A call that blocks the event loop, as a search of an index in this process does, cannot be broken
off. It counts as late afterwards: so a slow index delays a few requests and not all of them.
"""

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from vector_index.errors import IndexPausedError, VectorIndexError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failure:
    """A part that did not contribute, and why; without text or tokens of anybody's prompt."""

    component: str
    reason: str


class Circuit:
    """Guards one component, used from one event loop. `clock` gives seconds, monotonic."""

    def __init__(
        self,
        component: str,
        *,
        failures_to_open: int,
        open_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.component = component
        self._failures_to_open = failures_to_open
        self._open_s = open_s
        self._clock = clock
        self._in_a_row = 0
        self._closed_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a call now would be refused."""
        return self._in_a_row >= self._failures_to_open and self._clock() < self._closed_at

    async def attempt(self, call: Callable[[], Awaitable[T]], *, timeout_s: float) -> T | Failure:
        """
        What `call` returns, or a Failure if it raises, takes too long, or the circuit is open.

        Cancellation from outside passes through, and IndexPausedError, which is no failure.
        """
        if self.is_open:
            return Failure(self.component, "circuit open")
        if self._in_a_row >= self._failures_to_open:
            # The trial call: others stay out until it is decided, or for another while if it
            # is cancelled and never decided.
            self._closed_at = self._clock() + self._open_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                result = await call()
            deadline = limit.when()
            if deadline is not None and asyncio.get_running_loop().time() > deadline:
                raise TimeoutError
        except IndexPausedError:
            raise
        except TimeoutError:
            return self._failed(f"no answer within {timeout_s} s")
        except Exception as error:  # noqa: BLE001  logged, without its message
            # Our own messages are written to be logged; others might quote what they choked on.
            places = "".join(traceback.format_tb(error.__traceback__))
            log.debug("%s failed: %s\n%s", self.component, type(error).__name__, places)
            detail = f": {error}" if isinstance(error, VectorIndexError) else ""
            return self._failed(type(error).__name__ + detail)
        self._in_a_row = 0
        return result

    def _failed(self, reason: str) -> Failure:
        self._in_a_row += 1
        if self._in_a_row >= self._failures_to_open:
            self._closed_at = self._clock() + self._open_s
        if self._in_a_row == self._failures_to_open:
            log.warning("%s failed %d times in a row", self.component, self._in_a_row)
        return Failure(self.component, reason)
