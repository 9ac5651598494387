"""
Waits for reads from a disk as long as their pace lets expect that they are in time.

    |-- doubt ----|                                  |
    read at once                                     within    given up here at last
                  '--> at this pace later than that: given up now

So a disk that was fast and is slow now is waited for as long as it takes to see that, and its pace is known.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Collection, Set
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple

CHUNK_BYTES: Final = 1 << 20
"""Of one call to read: a disk that is slow shows its pace before an object is whole."""

_LOOK_S: Final = 0.01
_MOST_SLOW: Final = 3  # plans in a row with late reads; then nothing is read for `_PAUSE_S`
_PAUSE_S: Final = 10.0
_RECENT_S: Final = 60.0  # how long after such a pause the status still says that reads are late


class BytesRead:
    """How many bytes threads have read from a tier so far. Thread-safe."""

    def __init__(self) -> None:
        self._number = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        with self._lock:
            self._number += number

    def __int__(self) -> int:
        return self._number


class WaitedReads(NamedTuple):
    """The reads that are over and those that are not; bytes that were read in this time by all."""

    done: Set[Future[Any]]
    pending: Set[Future[Any]]
    num_bytes: int
    seconds: float
    has_pace: bool  # whether bytes of reads that are not over are counted


class PacedReads:
    """
    Reads that have just begun, as far as they are waited for. For one thread.

    `num_bytes`: of all of them. `doubt_s`: how long any pace is waited for. Other reads of the same disk
    count as progress of these, so a busy disk is waited for longer, within the same limit.
    """

    def __init__(
        self,
        reads: Collection[Future[Any]],
        *,
        num_bytes: int,
        within_s: float,
        doubt_s: float,
        bytes_read: BytesRead,
        has_pace: bool = True,
    ) -> None:
        """`has_pace`: bytes are counted as they come; else `doubt_s` is no limit."""
        self._began, self._before = time.perf_counter(), int(bytes_read)
        self._reads, self._pending = frozenset(reads), set(reads)
        self._num_bytes, self._bytes_read = num_bytes, bytes_read
        self._within_s, self._doubt_s = within_s, doubt_s if has_pace else math.inf
        self._has_pace = has_pace
        self._ends: list[float] = []  # of the reads that are over; readers' threads append
        for read in self._reads:
            read.add_done_callback(self._note_end)

    def wait(self, at_most_s: float = math.inf) -> bool:
        """Wait until all are over, or late; return whether they are by then."""
        until = time.perf_counter() + at_most_s
        self._wait(min(at_most_s, max(0.0, min(self._within_s, self._doubt_s) - self._seconds)))
        while self._pending and not self._is_late():
            left_s = until - time.perf_counter()
            if left_s <= 0:
                return False
            self._wait(min(_LOOK_S, self._within_s - self._seconds, left_s))
        return True

    def result(self) -> WaitedReads:
        """Return what is over now, and how far the reads have come."""
        self._wait(0.0)
        ends, seconds, progress = list(self._ends), self._seconds, self._progress
        if not self._pending and len(ends) == len(self._reads):
            seconds = max(ends, default=self._began) - self._began
        done = self._reads - self._pending
        return WaitedReads(done, self._pending, min(self._num_bytes, progress), seconds, self._has_pace)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    @property
    def _progress(self) -> int:
        return int(self._bytes_read) - self._before

    def _wait(self, seconds: float) -> None:
        _, self._pending = wait(self._pending, None if math.isinf(seconds) else max(0.0, seconds))

    def _is_late(self) -> bool:
        """Return whether the time is over, or will be before they are read, if their pace counts yet."""
        seconds = self._seconds
        if seconds < min(self._within_s, self._doubt_s):
            return False
        return seconds >= self._within_s or seconds * self._num_bytes > self._within_s * self._progress

    def _note_end(self, _: Future[Any]) -> None:
        self._ends.append(time.perf_counter())


class SlowReads:
    """Whether the reads of a tier have been late so often that it is left alone for a while. Thread-safe."""

    def __init__(self) -> None:
        self._number, self._paused_until = 0, -math.inf  # in a row
        self._lock = threading.Lock()

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._paused_until

    @property
    def is_recent(self) -> bool:
        """Return whether there was a pause lately."""
        return time.monotonic() < self._paused_until + _RECENT_S

    def note(self, is_slow: bool) -> None:
        """Note the reads of one plan."""
        with self._lock:
            self._number = self._number + 1 if is_slow else 0
            if self._number >= _MOST_SLOW:
                self._number, self._paused_until = 0, time.monotonic() + _PAUSE_S
