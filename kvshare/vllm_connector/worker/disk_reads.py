"""
Reads from disk, or from a shared store, into the arena. The load that waits for them: `disk_first.py`.

    Read     one segment; several loads may wait for it
    Reads    those of one load, which are waited for no longer than the plan said. They are settled in parts,
             in the order in which they were begun: a part is copied while the next one is read

What is late is computed in place of copied. It stays on disk, and in memory if the scheduler side says so. A
read that has not begun by then, and that no other load waits for, is cancelled: the next load needs the disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from itertools import pairwise

from delta_tree import SegmentId


class Read:
    """
    One segment, on its way into memory. `future`: whether it matched its checks; None is no. Thread-safe.
    """

    def __init__(self, segment_id: SegmentId, future: Future[bool | None]) -> None:
        self.segment_id = segment_id
        self._future = future
        self._num_waiting = 0  # loads
        self._lock = threading.Lock()
        self._ended_s: float | None = None
        future.add_done_callback(self._note_end)

    def wait_for(self) -> bool:
        """One more load waits for it, until `give_up`. Returns False if it was cancelled."""
        with self._lock:
            self._num_waiting += 1
            return not self._future.cancelled()

    def give_up(self) -> None:
        """A load waits no longer."""
        with self._lock:
            self._num_waiting -= 1
            if not self._num_waiting:
                self._future.cancel()  # which changes nothing if it has begun

    @property
    def is_over(self) -> bool:
        return self._future.done()

    @property
    def ended_s(self) -> float:
        """When it was over, by the clock of `time.perf_counter`; now if it is not over."""
        return time.perf_counter() if self._ended_s is None else self._ended_s

    @property
    def is_whole(self) -> bool | None:
        """Return whether it matched its checks; None if it was not read, so it may be whole below memory."""
        future = self._future
        return None if future.cancelled() or future.exception() is not None else bool(future.result())

    def wait(self) -> None:
        """Wait until it is over."""
        wait([self._future])

    def _note_end(self, _: object) -> None:
        self._ended_s = time.perf_counter()


class Reads:
    """`late`: what was not read in time, or has no room. Known of a part when it is settled."""

    def __init__(self, reads: Sequence[Read], without_room: Sequence[SegmentId], *, within_s: float) -> None:
        self.reads = reads
        self.late: set[SegmentId] = set(without_room)
        self.failed: set[SegmentId] = set()
        self._began = time.perf_counter()
        self._within_s = within_s
        self._ended: dict[Read, float] = {}  # of what is settled: when it was over, or given up

    @property
    def wanted(self) -> frozenset[SegmentId]:
        """Return the segments that are read."""
        return frozenset(read.segment_id for read in self.reads)

    @property
    def missing(self) -> set[SegmentId]:
        """Return the segments that are not in memory, of the settled parts."""
        return self.late | self.failed

    def parts(self, most: int) -> list[Sequence[Read]]:
        """Return the reads in at most so many parts, each of as many reads as the others, or one more."""
        number = min(most, len(self.reads))
        ends = [len(self.reads) * part // number for part in range(number + 1)] if number else [0]
        return [self.reads[start:end] for start, end in pairwise(ends)]

    def are_over(self, part: Sequence[Read]) -> bool:
        """Return whether nothing more of a part is waited for."""
        is_late = time.perf_counter() - self._began >= self._within_s
        return is_late or all(read.is_over for read in part)

    def settle(self, part: Sequence[Read]) -> None:
        """Decide which segments of a part were read in time. Called once, by the thread that copies."""
        for read in part:
            is_whole = read.is_whole if read.is_over else None
            self._ended[read] = read.ended_s
            read.give_up()
            if is_whole is None:
                self.late.add(read.segment_id)
            elif not is_whole:
                self.failed.add(read.segment_id)

    def seconds(self, part: Sequence[Read]) -> float:
        """Return how long a part that is settled took from the beginning of all, or was waited for."""
        return max((self._ended[read] - self._began for read in part), default=0.0)
