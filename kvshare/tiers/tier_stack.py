"""
Host memory above a disk or a shared store, as one tier: what is stored is in memory first, and written after
that.

    put      into memory; the writer's thread writes it to the tier below
    memory   full: segments that are below it, too, leave it, in the order of `store.eviction`
    fetch    from memory, else from below, and into memory again, once it is whole
    drop     from all

The keeper evicts prompts for several budgets: the KV in memory only, the KV on disk or due there, and the KV
that is known to be in a shared store.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

from delta_tree import EvictionQueue, RecencyQueue, Segment, SegmentId
from kvshare.kv.sequence import SegmentKV
from kvshare.kv.tier import Budget, Fetched
from kvshare.status import TierStatus
from kvshare.tiers.kv_object import Rows
from kvshare.tiers.lower_tier import LowerTier
from kvshare.tiers.near_memory import NearMemory
from kvshare.tiers.pace import SlowReads, WaitedReads
from kvshare.tiers.readers import StackReads, TierReaders, paced, result_of
from kvshare.tiers.shared_tier import SharedTier, remove_from_shared
from kvshare.tiers.shares import OnDisk, Share
from kvshare.tiers.write_behind import WriteBehind
from kvshare.tiers.write_problem import WriteProblem

log = logging.getLogger(__name__)

_FLUSH_S = 20.0  # how long `close` writes what is due


@dataclass(frozen=True, slots=True, eq=False)
class _Held:
    segment: Segment
    kv: SegmentKV

    @property
    def num_bytes(self) -> int:
        return self.kv.num_bytes


class TierStack:
    """A `HostTier`. Thread-safe; its lock is held for updates of dictionaries only."""

    def __init__(
        self,
        max_bytes: int,
        below: LowerTier,
        *,
        write_bytes_per_s: float,
        problem: str | None = None,
        queue: EvictionQueue[SegmentId] | None = None,
    ) -> None:
        """
        `problem`: why the disk could not be opened, as logged; None: it was. `queue`: of what leaves memory;
        by default the least recently used
        """
        self.max_bytes = max_bytes  # of memory
        self.below = below
        self.on_disk = OnDisk(lambda entry: entry not in self._memory and entry in below)
        self._in_memory_only = Share(max_bytes, self._num_due, lambda entry: entry in self._memory.due)
        self._below_or_due = tuple(self._share_of(tier) for tier in below.parts)
        self._memory: NearMemory[_Held] = NearMemory(max_bytes, queue or RecencyQueue())
        self._to_write: OrderedDict[SegmentId, _Held] = OrderedDict()  # what is due and is written below
        self._counts: Counter[str] = Counter()
        where = "disk" if below.name == "disk" else "the shared store"
        self._problem = WriteProblem(log, where, lost_with="the process", reason=problem)
        self._slow = SlowReads()  # of the nearest tier
        self._lock = threading.RLock()
        self._readers = TierReaders(below.parts)
        self._writer = WriteBehind(self.write_due, bytes_per_s=write_bytes_per_s)
        self._writer.wake()

    @property
    def num_bytes(self) -> int:
        """Return the bytes in memory."""
        return self._memory.num_bytes

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Return the budgets of memory and, unless nothing can be written there now, of the tiers below."""
        below = self._below_or_due if self._problem.reason is None else ()
        return (self._in_memory_only, *below)

    def __contains__(self, segment_id: object) -> bool:
        return segment_id in self._memory or segment_id in self.below

    def put(self, segment: Segment, kv: SegmentKV) -> None:
        """Store a segment; the caller has made room for it. Raises ValueError if it is already held."""
        with self._lock:
            if segment.segment_id in self:
                raise ValueError(f"segment {segment.segment_id} is already held")
            held = _Held(segment, kv)
            if self.below.takes(segment):
                self._to_write[segment.segment_id] = held
            self._memory.put(segment.segment_id, held, is_due=True)
        self._writer.wake()

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Forget segments: their memory is free at once, the disk soon after. Unknown ids are ignored."""
        entries = list(segment_ids)
        with self._lock:
            for segment_id in entries:
                self._memory.forget(segment_id)
                self._written(segment_id)
        if self.below.drop(entries):
            self._writer.wake()

    def fetch(
        self, segment_ids: Iterable[SegmentId], *, within_s: float = math.inf, doubt_s: float = math.inf
    ) -> Fetched:
        """
        Return the segments whose bytes match their checks. The others are missing or late: they were not read
        in time, or their pace (`pace.py`) says so. Late ones will be in memory for the next request.
        """
        fetched = self.begin(segment_ids, within_s=within_s, doubt_s=doubt_s)
        if fetched.reads is None:
            return fetched
        fetched.reads.wait(math.inf)
        return fetched.reads.end()

    def begin(self, segment_ids: Iterable[SegmentId], *, within_s: float, doubt_s: float) -> Fetched:
        """Do what `fetch` does without waiting. `late` is what is not read at all now."""
        wanted = dict.fromkeys(segment_ids)
        with self._lock:
            near = self._memory.use(wanted)
        segments = {
            entry: held.kv
            for entry, held in near.items()
            if held.kv.computed_checksum() == held.segment.checksum
        }
        self._counts["memory"] += len(segments)
        self.release(near.keys() - segments.keys())  # damaged in memory
        far = [entry for entry in wanted if entry not in segments and entry in self.below]
        nearest, is_paused = self.below.parts[0], self._slow.is_paused
        late = frozenset(entry for entry in far if is_paused and entry in nearest)
        fetched = Fetched(segments, frozenset(wanted).difference(segments, far), late)
        if not far:
            self._counts["missing"] += len(fetched.missing)
            return fetched
        reads = {self._readers.read(entry, self._into_memory): entry for entry in far if entry not in late}
        waiting = paced(reads, nearest, within_s=within_s, doubt_s=doubt_s)
        return replace(fetched, reads=StackReads(waiting, partial(self._ended, fetched, reads)))

    def note_open(self) -> None:
        """Note that the disk, which could not be opened before, is open now."""
        self._problem.end()
        self._writer.wake()

    def close(self) -> None:
        """Write what is due, for at most `_FLUSH_S`, and stop. What is not written by then is lost."""
        self._writer.close(within_s=_FLUSH_S)
        self._readers.close(waits=False)
        self.below.close()
        if self._to_write:
            log.warning("%d segments of KV were not written, and are lost", len(self._to_write))

    def status(self) -> tuple[TierStatus, ...]:
        """Return the status of each tier, for metrics and administrators."""
        num_hits, num_late, missing = self._counts["below"], self._counts["late"], self._counts["missing"]
        memory = TierStatus(
            name="memory",
            num_segments=len(self._memory),
            num_bytes=self.num_bytes,
            max_bytes=self.max_bytes,
            num_hits=self._counts["memory"],
            num_misses=num_hits + num_late + missing,
        )
        statuses, of_lower = [memory], self.below.parts[1:]
        num_lower = sum(self._counts[tier.name] for tier in of_lower)
        for number, tier in enumerate(self.below.parts):
            is_first, counts = number == 0, tier.counts
            statuses.append(
                TierStatus(
                    name=tier.name,
                    num_segments=len(tier),
                    num_bytes=tier.num_bytes,
                    max_bytes=tier.max_bytes,
                    num_hits=num_hits - num_lower if is_first else self._counts[tier.name],
                    num_misses=num_late + missing + num_lower if is_first else num_late + missing,
                    num_due_bytes=self._num_due() if is_first else 0,
                    num_written=counts["written"],
                    num_dropped=counts["damaged"] + counts["failed"],
                    num_late=num_late if is_first else 0,
                    problem=self._problem.reason if is_first else tier.problem,
                    is_late=is_first and self._slow.is_recent,
                )
            )
        return tuple(statuses)

    def _share_of(self, tier: LowerTier) -> Share:
        def held() -> int:
            return tier.num_bytes + (self._num_due() if tier is self.below.parts[0] else 0)

        holds = tier.takes_room if isinstance(tier, SharedTier) else tier.__contains__
        return Share(tier.max_bytes, held, holds)

    def _ended(
        self, begun: Fetched, reads: Mapping[Future[SegmentKV | None], SegmentId], waited: WaitedReads
    ) -> Fetched:
        """Return what `begin` has found, with what was read since, and note what is late."""
        read = {reads[each]: kv for each in waited.done if (kv := result_of(each)) is not None}
        others = frozenset(reads.values()) - read.keys()
        late = frozenset(entry for entry in others if entry in self.below)
        missing = begun.missing | others - late
        is_slow = any(reads[each] in self.below.parts[0] for each in waited.pending)
        if reads:
            self._slow.note(is_slow)
        self._counts.update(below=len(read), late=len(late), missing=len(missing))
        return Fetched(
            {**begun.segments, **read},
            missing,
            begun.late | late,
            max(sum(kv.num_bytes for kv in read.values()), waited.num_bytes if is_slow else 0),
            waited.seconds,
            is_slow=is_slow,
            has_pace=waited.has_pace,
        )

    def _into_memory(self, tier: LowerTier, segment: Segment, rows: tuple[Rows, ...]) -> SegmentKV:
        """Keep a segment that was read below, and return its KV. Runs on a reader's thread."""
        segment_id = segment.segment_id
        kv = SegmentKV.of_rows(self.below.form.layout, segment.num_tokens, rows)
        with self._lock:
            self._counts[tier.name] += tier.name != self.below.name
            if segment_id in self.below and segment_id not in self._memory:
                self._memory.put(segment_id, _Held(segment, kv), is_due=False)
        return kv

    def release(self, segment_ids: Iterable[SegmentId]) -> None:
        """Free the memory of these segments only: the tiers below may hold them whole."""
        with self._lock:
            for segment_id in segment_ids:
                self._memory.forget(segment_id)

    def _num_due(self) -> int:
        return self._memory.num_due_bytes

    def write_due(self) -> int | None:
        """Delete a garbage file, else write the oldest due segment. Returns the bytes written; None: idle."""
        if not self.below.is_swept:
            self.below.sweep()
            return 0
        with self._lock:
            held = next(iter(self._to_write.values()), None)
        if held is None:
            return 0 if self.below.sweep() else None
        segment = held.segment
        if held.kv.computed_checksum() != segment.checksum:  # damaged in memory: `fetch` finds that, too
            self._written(segment.segment_id)
            return 0
        try:
            self.below.write(segment, held.kv.rows())
        except OSError as exc:
            self._problem.note(exc)
            with self._lock:  # the others first: this one may never be writable
                if segment.segment_id in self._to_write:
                    self._to_write.move_to_end(segment.segment_id)
            return 0 if self.below.sweep() else None  # perhaps only garbage takes the space
        self._problem.end()
        if not self._written(segment.segment_id):  # dropped meanwhile
            self.below.drop([segment.segment_id])
            remove_from_shared(self.below.parts, segment)
        return segment.num_bytes

    def write_again(self) -> None:
        """Mark as due what memory holds and the tier below has lost."""
        with self._lock:
            for segment_id, held in self._memory.items():
                if segment_id not in self._memory.due and segment_id not in self.below:
                    self._memory.owe(segment_id)
                    if self.below.takes(held.segment):
                        self._to_write[segment_id] = held
        self._writer.wake()

    def _written(self, segment_id: SegmentId) -> bool:
        """Mark a segment as no longer due. Returns whether it was due (held in memory only) until now."""
        with self._lock:
            self._to_write.pop(segment_id, None)
            return self._memory.written(segment_id)
