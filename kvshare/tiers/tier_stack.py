"""
Host memory above a disk, as one tier: what is stored is in memory first, and written after that.

    put      into memory; the writer's thread writes it to disk
    memory   full: segments that are on disk, too, leave it, those first that were used longest ago
    fetch    from memory, else from disk, and into memory again, once it is whole
    drop     from both

There are two budgets for which the keeper evicts prompts: what is in memory only, and what is on disk or will
be.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass

from delta_tree import Segment, SegmentId
from kvshare.kv.sequence import SegmentKV
from kvshare.kv.tier import Budget, Fetched
from kvshare.status import TierStatus
from kvshare.tiers.disk_tier import BusyError, DiskTier
from kvshare.tiers.write_behind import WriteBehind

log = logging.getLogger(__name__)

_READERS = 4  # files at once
_FLUSH_S = 20.0  # for what is not written when the process is stopped
_MOST_LATE = 3  # plans in a row; then nothing is read for a while
_PAUSE_S = 10.0
_RECENT_S = 60.0  # without late reads, after which they count as over


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    segment: Segment
    kv: SegmentKV


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A `Budget` of a stack, which `held` counts."""

    max_bytes: int
    held: Callable[[], int]
    holds: Callable[[SegmentId], bool]

    @property
    def num_bytes(self) -> int:
        return self.held()

    def __contains__(self, segment_id: SegmentId) -> bool:
        return self.holds(segment_id)


class OnDisk(Container[SegmentId]):
    """The segments of a stack that are on disk and not in memory."""

    def __init__(self, holds: Callable[[object], bool]) -> None:
        self._holds = holds

    def __contains__(self, segment_id: object) -> bool:
        return self._holds(segment_id)


class TierStack:
    """A `HostTier`. Thread-safe; its lock is held for updates of dictionaries only."""

    def __init__(
        self, max_bytes: int, disk: DiskTier, *, write_bytes_per_s: float, problem: str | None = None
    ) -> None:
        """`problem`: why the disk could not be opened, as logged; None: it was."""
        self.max_bytes = max_bytes  # of memory
        self.num_bytes = 0  # in memory
        self.disk = disk
        self.on_disk = OnDisk(lambda entry: entry not in self._memory and entry in disk)
        self._in_memory_only = Share(max_bytes, lambda: self._num_due, lambda entry: entry in self._due)
        self._on_disk_or_due = Share(
            disk.max_bytes, lambda: disk.num_bytes + self._num_due, disk.__contains__
        )
        self._memory: OrderedDict[SegmentId, _Held] = OrderedDict()  # used longest ago first
        self._due: OrderedDict[SegmentId, _Held] = OrderedDict()  # in memory, and not on disk yet
        self._num_due = 0  # bytes of them
        self._counts: Counter[str] = Counter()
        self._problem = problem  # why nothing is written now
        self._num_late, self._reads_from = 0, -math.inf
        self._lock = threading.RLock()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kvshare-disk")
        self._writer = WriteBehind(self.write_due, bytes_per_s=write_bytes_per_s)
        self._writer.wake()

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Memory; and the disk, unless nothing can be written there now."""
        if self._problem is not None:
            return (self._in_memory_only,)
        return (self._in_memory_only, self._on_disk_or_due)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._memory or segment_id in self.disk

    def put(self, segment: Segment, kv: SegmentKV) -> None:
        """Store a segment, which the caller has made room for. Raises ValueError for one that is held."""
        with self._lock:
            if segment.segment_id in self:
                raise ValueError(f"segment {segment.segment_id} is already held")
            held = self._memory[segment.segment_id] = self._due[segment.segment_id] = _Held(segment, kv)
            self.num_bytes += held.kv.num_bytes
            self._num_due += held.kv.num_bytes
            self._shrink()
        self._writer.wake()

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Free segments in memory, and soon after that on disk; unknown ids are ignored."""
        entries = list(segment_ids)
        with self._lock:
            for segment_id in entries:
                self._forget(segment_id)
                if (due := self._due.pop(segment_id, None)) is not None:
                    self._num_due -= due.kv.num_bytes
        if self.disk.drop(entries):
            self._writer.wake()

    def fetch(self, segment_ids: Iterable[SegmentId], *, within_s: float = math.inf) -> Fetched:
        """
        The segments whose bytes match their checks. The others are missing, or late: not read in that time.

        What comes late is in memory for the next request.
        """
        wanted = frozenset(segment_ids)
        with self._lock:
            near = {entry: held for entry in wanted if (held := self._memory.get(entry)) is not None}
            for entry in near:
                self._memory.move_to_end(entry)
        segments = {
            entry: held.kv
            for entry, held in near.items()
            if held.kv.computed_checksum() == held.segment.checksum
        }
        self._counts["memory"] += len(segments)
        self.release(near.keys() - segments.keys())  # damaged in memory
        far = [entry for entry in wanted - segments.keys() if entry in self.disk]
        if not far:
            self._counts["missing"] += len(wanted) - len(segments)
            return Fetched(segments, wanted - segments.keys())
        began = time.perf_counter()
        read, late = self._read_all(far, within_s)
        segments |= read
        num_bytes = sum(kv.num_bytes for kv in read.values())
        self._counts["disk"] += len(read)
        self._counts["disk bytes"] += num_bytes
        self._note_late(bool(late))
        missing = wanted - segments.keys() - late
        self._counts["missing"] += len(missing)
        return Fetched(segments, missing, late, num_bytes, time.perf_counter() - began)

    def close(self) -> None:
        """Write what is due, for some seconds, and stop. What is not written then is lost."""
        self._writer.close(within_s=_FLUSH_S)
        self._readers.shutdown(wait=False, cancel_futures=True)
        if self._due:
            log.warning("%d segments of KV were not written to disk, and are lost", len(self._due))

    def status(self) -> tuple[TierStatus, ...]:
        """Of each tier, for metrics and administrators."""
        missing, disk, counts = self._counts["missing"], self.disk, self.disk.counts
        return (
            TierStatus(
                name="memory",
                num_segments=len(self._memory),
                num_bytes=self.num_bytes,
                max_bytes=self.max_bytes,
                num_hits=self._counts["memory"],
                num_misses=self._counts["disk"] + self._counts["late"] + missing,
            ),
            TierStatus(
                name="disk",
                num_segments=len(disk),
                num_bytes=disk.num_bytes,
                max_bytes=disk.max_bytes,
                num_hits=self._counts["disk"],
                num_misses=self._counts["late"] + missing,
                num_due_bytes=self._num_due,
                num_written=counts["written"],
                num_dropped=counts["damaged"] + counts["failed"],
                num_late=self._counts["late"],
                problem=self._problem,
                is_late=time.monotonic() < self._reads_from + _RECENT_S,
            ),
        )

    def _read_all(
        self, entries: Iterable[SegmentId], within_s: float
    ) -> tuple[dict[SegmentId, SegmentKV], frozenset[SegmentId]]:
        """What was read in time, and what is late."""
        if time.monotonic() < self._reads_from:
            return {}, frozenset(entries)
        reads = {self._readers.submit(self._read, entry): entry for entry in entries}
        done, pending = wait(reads, None if math.isinf(within_s) else max(0.0, within_s))
        for each in pending:
            each.cancel()
        read = {reads[each]: kv for each in done if (kv := each.result()) is not None}
        late = frozenset(entry for entry in reads.values() if entry not in read and entry in self.disk)
        self._counts["late"] += len(late)
        return read, late

    def _read(self, segment_id: SegmentId) -> SegmentKV | None:
        """From disk, and into memory. Runs in a thread of its own."""
        try:
            rows = self.disk.read(segment_id)
        except BusyError:
            return None
        segment = None if rows is None else self.disk.segment(segment_id)
        if rows is None or segment is None:
            return None
        kv = SegmentKV.of_rows(self.disk.form.layout, segment.num_tokens, rows)
        with self._lock:
            if segment_id in self.disk and segment_id not in self._memory:
                self._memory[segment_id] = _Held(segment, kv)
                self.num_bytes += kv.num_bytes
                self._shrink()
        return kv

    def _note_late(self, is_late: bool) -> None:
        with self._lock:
            self._num_late = self._num_late + 1 if is_late else 0
            if self._num_late >= _MOST_LATE:
                self._num_late, self._reads_from = 0, time.monotonic() + _PAUSE_S

    def _shrink(self) -> None:
        """Free what is on disk, too, until memory is within its limit. The lock is held."""
        for segment_id in list(self._memory) if self.num_bytes > self.max_bytes else ():
            if self.num_bytes <= self.max_bytes:
                return
            if segment_id not in self._due:
                self._forget(segment_id)

    def release(self, segment_ids: Iterable[SegmentId]) -> None:
        """Free memory of these segments, which may be whole on disk."""
        with self._lock:
            for segment_id in segment_ids:
                self._forget(segment_id)

    def _forget(self, segment_id: SegmentId) -> None:
        if (held := self._memory.pop(segment_id, None)) is not None:
            self.num_bytes -= held.kv.num_bytes

    def write_due(self) -> int | None:
        """Delete a file that belongs to nothing; where none does, write the segment that is due longest."""
        if not self.disk.is_swept:
            self.disk.sweep()
            return 0
        with self._lock:
            held = next(iter(self._due.values()), None)
        if held is None:
            return 0 if self.disk.sweep() else None
        segment = held.segment
        if held.kv.computed_checksum() != segment.checksum:  # damaged in memory: `fetch` finds that, too
            self._written(segment.segment_id)
            return 0
        try:
            self.disk.write(segment, held.kv.rows())
        except OSError as exc:
            self._note_problem(exc)
            return 0 if self.disk.sweep() else None  # what belongs to nothing may be all that is in the way
        if self._problem is not None:
            self._problem = None
            log.warning("KV is written to disk again")
        if not self._written(segment.segment_id):  # dropped meanwhile
            self.disk.drop([segment.segment_id])
        return segment.num_bytes

    def _written(self, segment_id: SegmentId) -> bool:
        with self._lock:
            held = self._due.pop(segment_id, None)
            self._num_due -= 0 if held is None else held.kv.num_bytes
            return held is not None

    def _note_problem(self, exc: OSError) -> None:
        if self._problem is None:
            self._problem = exc.strerror or type(exc).__name__
            log.warning(
                "KV is not written to disk: %s. It stays in memory, where it is lost with the process; this "
                "is tried again",
                self._problem,
            )
