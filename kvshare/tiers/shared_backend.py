"""
The interface of a store for a shared tier: values by key, which expire, and messages in order.

`redis_backend.py` implements it with Valkey or Redis. Other stores need only these methods.
"""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

_T = TypeVar("_T")

MOST_FAILURES: Final = 3  # in a row; then the store is not asked for `PAUSE_S`
PAUSE_S: Final = 10.0


class BackendError(OSError):
    """The store cannot do this now; `strerror` says why, without names, keys or secrets."""

    def __init__(self, reason: str) -> None:
        super().__init__(errno.EIO, reason)


@dataclass(frozen=True, slots=True)
class News:
    """One message that a server has announced, and its place in the channel."""

    place: str
    message: bytes


class SharedBackend(Protocol):
    """
    Thread-safe. Each method blocks for a few seconds at most, and raises BackendError.

    A value is whole or missing at every moment. It expires `keep_s` seconds after it was last written, read
    by `get`, or renewed; earlier if the store needs its space.
    """

    def put(self, key: str, value: bytes, *, keep_s: int) -> None: ...

    def put_new(self, key: str, value: bytes, *, keep_s: int) -> bool:
        """Store a value unless the key has one. Returns whether it was stored."""

    def get(self, key: str, *, keep_s: int) -> bytes | None: ...

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        """Read values without renewing them."""

    def renew(self, keys: Sequence[str], *, keep_s: int) -> list[bool]:
        """Restart the time of values. Returns for each key whether its value is there."""

    def delete(self, keys: Sequence[str]) -> None: ...

    def announce(self, channel: str, message: bytes, *, most: int, keep_s: int) -> None:
        """Append a message for all servers. About `most` are kept, until `keep_s` seconds after the last."""

    def news(self, channel: str, *, after: str | None, most: int) -> list[News]:
        """Read up to `most` messages after a place, the oldest first; None: from the first one kept."""

    def latest(self, channel: str, *, before: str | None, most: int) -> list[News]:
        """Read up to `most` messages before a place, the newest first; None: from the very last one."""

    def epoch(self, name: str, *, keep_s: int) -> str:
        """Return a text that changes once the store has lost its values, or was not asked for `keep_s` s."""

    def close(self) -> None: ...


class Breaker:
    """Stops calls to a store for `PAUSE_S` after `MOST_FAILURES` failures in a row. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.reason: str | None = None  # why the last call failed; None: it succeeded
        self._clock = clock
        self._num_failures, self._until = 0, -float("inf")
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        """Return whether calls are stopped now."""
        return self._clock() < self._until

    def check(self) -> None:
        """Raise BackendError while calls are stopped."""
        if self.is_open:
            raise BackendError(self.reason or "it is left alone for a while")

    def call(self, ask: Callable[[], _T]) -> _T:
        """Return the store's answer. Raises BackendError; at once while calls are stopped."""
        self.check()
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
