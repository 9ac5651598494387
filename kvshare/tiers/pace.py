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
from collections.abc import Collection
from concurrent.futures import Future, wait
from typing import Any, Final, NamedTuple

CHUNK_BYTES: Final = 1 << 20
"""Of one call to read: a disk that is slow shows its pace before an object is whole."""

_LOOK_S: Final = 0.01


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

    done: set[Future[Any]]
    pending: set[Future[Any]]
    num_bytes: int
    seconds: float
    has_pace: bool = True  # whether bytes of reads that are not over are counted


def wait_for(
    reads: Collection[Future[Any]],
    *,
    num_bytes: int,
    within_s: float,
    doubt_s: float,
    bytes_read: BytesRead,
) -> WaitedReads:
    """
    Until all are over, or late.

    `num_bytes`: of all of them. `doubt_s`: how long any pace is waited for. Other reads of the same disk
    count as progress of these, so a busy disk is waited for longer, within the same limit.
    """
    began, before = time.perf_counter(), int(bytes_read)
    first_s = max(0.0, min(within_s, doubt_s))
    _, pending = wait(reads, None if math.isinf(first_s) else first_s)
    while pending:
        seconds, progress = time.perf_counter() - began, int(bytes_read) - before
        if seconds >= within_s or seconds * num_bytes > within_s * progress:
            break
        _, pending = wait(pending, min(_LOOK_S, within_s - seconds))
    seconds, progress = time.perf_counter() - began, int(bytes_read) - before
    return WaitedReads(set(reads) - pending, set(pending), min(num_bytes, progress), seconds)
