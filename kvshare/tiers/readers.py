"""
Threads that read the tiers below memory, `_READERS` for each: the disk does not wait for a hanging store.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

from delta_tree import Segment, SegmentId
from kvshare.kv.tier import Fetched
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.kv_object import Rows
from kvshare.tiers.lower_tier import BusyError, LowerTier
from kvshare.tiers.pace import BytesRead, PacedReads, WaitedReads

_T = TypeVar("_T")
Take = Callable[[LowerTier, Segment, tuple[Rows, ...]], _T]

_READERS: Final = 4  # threads for each tier, which read one segment each


class TierReaders:
    """Reads a segment from the first tier that has it whole. Thread-safe."""

    def __init__(self, tiers: Sequence[LowerTier]) -> None:
        """`tiers`: the nearest first."""
        self._tiers = tuple(tiers)
        self._pools = [
            ThreadPoolExecutor(_READERS, thread_name_prefix=f"kvshare-{tier.name}") for tier in tiers
        ]

    def read(self, segment_id: SegmentId, take: Take[_T]) -> Future[_T | None]:
        """
        Read a segment. The future's result is that of `take`, which runs on a reader's thread; None if no
        tier has the segment whole, and BusyError if none has it but one could not be read now.

        Raises:  RuntimeError if no thread can be started
        """
        future: Future[_T | None] = Future()
        self._begin(segment_id, take, future, 0)
        return future

    def close(self, *, waits: bool) -> None:
        """Cancel reads that have not begun. `waits`: wait for those that have."""
        for pool in self._pools:
            pool.shutdown(wait=waits, cancel_futures=True)

    def _begin(
        self, segment_id: SegmentId, take: Take[_T], future: Future[_T | None], first: int, busy: bool = False
    ) -> None:
        """Read from the first tier from `first` on that knows the segment. `busy`: one before was busy."""
        numbers = range(first, len(self._tiers))
        number = next((each for each in numbers if segment_id in self._tiers[each]), None)
        if number is not None:
            read = self._pools[number].submit(self._read, segment_id, take, future, number, busy)
            read.add_done_callback(partial(_end_cancelled, future))
        elif future.running() or future.set_running_or_notify_cancel():
            if busy:
                future.set_exception(BusyError())
            else:
                future.set_result(None)

    def _read(
        self, segment_id: SegmentId, take: Take[_T], future: Future[_T | None], number: int, busy: bool
    ) -> None:
        if not (future.running() or future.set_running_or_notify_cancel()):
            return
        tier = self._tiers[number]
        try:
            segment, rows = tier.segment(segment_id), None
            try:
                rows = tier.read(segment_id)
            except BusyError:
                busy = True
            if rows is not None and segment is not None:
                future.set_result(take(tier, segment, rows))
            else:
                self._begin(segment_id, take, future, number + 1, busy)
        except Exception as exc:  # noqa: BLE001  `result_of` raises it
            future.set_exception(exc)


def result_of(read: Future[_T | None]) -> _T | None:
    """Return the result of a read that is over; None if it was cancelled, or if a tier was busy."""
    try:
        return read.result(timeout=0)
    except (BusyError, CancelledError):
        return None


def paced(
    reads: Mapping[Future[Any], SegmentId], nearest: LowerTier, *, within_s: float, doubt_s: float
) -> PacedReads:
    """Return the wait for these reads of the nearest tier or others. A shared store's pace is not known."""
    segments = [nearest.segment(entry) for entry in reads.values()]
    return PacedReads(
        reads,
        num_bytes=sum(segment.num_bytes for segment in segments if segment is not None),
        within_s=within_s,
        doubt_s=doubt_s,
        bytes_read=nearest.bytes_read if isinstance(nearest, DiskTier) else BytesRead(),
        has_pace=isinstance(nearest, DiskTier) and None not in segments,
    )


class StackReads:
    """A `PendingReads`. `ended`: makes the result."""

    def __init__(self, waiting: PacedReads, ended: Callable[[WaitedReads], Fetched]) -> None:
        self._waiting, self._ended = waiting, ended

    def wait(self, at_most_s: float) -> bool:
        return self._waiting.wait(at_most_s)

    def end(self) -> Fetched:
        waited = self.cancel()
        return self._ended(waited)

    def cancel(self) -> WaitedReads:
        waited = self._waiting.result()
        for each in waited.pending:
            each.cancel()
        return waited


def _end_cancelled(future: Future[_T | None], read: Future[None]) -> None:
    """End the future of a read that was cancelled before it began, as this process stops."""
    if not read.cancelled():
        return
    if future.running():
        future.set_exception(BusyError())
    elif future.cancel():
        future.set_running_or_notify_cancel()
