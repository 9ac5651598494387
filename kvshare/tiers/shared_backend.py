"""
What a store must offer to be a shared tier: values by key that end by themselves, and news in order.

`redis_backend.py` is one, over Valkey or Redis. Another needs these methods only.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

_T = TypeVar("_T")

MOST_FAILURES: Final = 3  # in a row; then the store is left alone for a while
PAUSE_S: Final = 10.0


class BackendError(OSError):
    """The store does not do it now; `strerror` says why, without names, keys or secrets."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EIO, reason)


@dataclass(frozen=True, slots=True)
class News:
    """One message that a server has announced, and its place among them."""

    place: str
    message: bytes


class SharedBackend(Protocol):
    """
    Thread-safe. Each method blocks for at most some seconds, and raises BackendError.

    A value is whole or missing at every moment; it ends `keep_s` seconds after it was last written, read by
    `get`, or renewed, or earlier if the store needs its room.
    """

    def put(self, key: str, value: bytes, *, keep_s: int) -> None: ...

    def put_new(self, key: str, value: bytes, *, keep_s: int) -> bool:
        """Store it unless there is one. Returns whether it was stored."""

    def get(self, key: str, *, keep_s: int) -> bytes | None: ...

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read values without renewing them."""

    def renew(self, keys: Sequence[str], *, keep_s: int) -> int:
        """Returns how many of them are there."""

    def delete(self, keys: Sequence[str]) -> None: ...

    def announce(self, channel: str, message: bytes, *, most: int, keep_s: int) -> None:
        """Tell all servers. About `most` messages are kept, until `keep_s` seconds after the last one."""

    def news(self, channel: str, *, after: str | None, most: int) -> list[News]:
        """The next messages after a place, the oldest first; None: from the first that is kept."""

    def latest(self, channel: str, *, before: str | None, most: int) -> list[News]:
        """The last messages before a place, the newest first; None: the last of all."""

    def epoch(self, name: str, *, keep_s: int) -> str:
        """Stays the same until the store has lost what it had, or no server asked for `keep_s` seconds."""

    def close(self) -> None: ...


class Breaker:
    """Leaves a store alone for a while after failures in a row. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason: str | None = None  # why the last call failed; None: it did not
        self._clock = clock
        self._num_failures, self._until = 0, -float("inf")
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Return whether nothing is asked now."""
        return self._clock() < self._until

    def call(self, ask: Callable[[], _T]) -> _T:
        """Return what the store answers. Raises BackendError; at once while it is left alone."""
        if self.is_open:
            raise BackendError(self.reason or "it is left alone for a while")
        try:
            answer = ask()
        except BackendError as exc:
            with self._lock:
                self.reason = exc.strerror
                self._num_failures += 1
                if self._num_failures >= MOST_FAILURES:
                    # One more failure after the pause is enough for the next pause.
                    self._num_failures, self._until = MOST_FAILURES - 1, self._clock() + PAUSE_S
            raise
        with self._lock:
            self.reason, self._num_failures = None, 0
        return answer
