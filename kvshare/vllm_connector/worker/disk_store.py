"""
Segments in host memory with files below them, or values in a shared store, or both: what is saved is written
there, and read again when needed.

    write    what the scheduler side knows to be whole; a thread writes it next to everything else
    evict    from memory; the file stays
    drop     from memory and from disk; a shared store keeps it, for others
    adopt    what others have written to a shared store can be read
    reads    into the arena, by threads that read; a load waits for them, see `disk_reads.py`
    preload  the same for a request that waits for blocks: its load finds what is there, or under way

A segment that is dropped while it is written or read stays in memory until that is over. Only with a single
rank: see `disk_start.py`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import partial

import torch

from delta_tree import Segment, SegmentId
from kvshare.kv.layout import KVLayout
from kvshare.kv.sums import combined, sums
from kvshare.tiers.disk_tier import DiskTier
from kvshare.tiers.kv_object import Rows
from kvshare.tiers.lower_tier import LowerTier
from kvshare.tiers.readers import TierReaders
from kvshare.tiers.shared_tier import SharedTier
from kvshare.tiers.write_behind import WriteBehind
from kvshare.tiers.write_problem import WriteProblem
from kvshare.vllm_connector.metadata import DiskReport, Preloads, WriteRequest
from kvshare.vllm_connector.worker.disk_reads import Read, Reads
from kvshare.vllm_connector.worker.segment_store import SegmentStore, Stored

log = logging.getLogger("vllm.kvshare")

_FLUSH_S = 5.0  # to write what is due when vLLM is stopped
_INDEX_EVERY = 4096  # written segments: after a kill, a start reads the headers of no more files than that
_PAUSE_S = 1.0  # after a shared store did not take a write: each try prepares it again


class DiskStore(SegmentStore):
    """Methods run on the worker's thread unless they say otherwise."""

    def __init__(
        self,
        buffer: torch.Tensor,
        layout: KVLayout,
        below: LowerTier,
        *,
        write_bytes_per_s: float,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_close`: called when nothing below is used any more."""
        keys, _ = layout.planes
        super().__init__(buffer, layout, num_heads=keys.num_heads)
        self.below = below
        self._on_close = on_close
        self._due: OrderedDict[SegmentId, tuple[Segment, Stored]] = OrderedDict()
        self._writing: SegmentId | None = None
        self._written: list[SegmentId] = []  # not reported yet
        self._num_written = 0
        self._dropped_late: list[Stored] = []  # that the writer still reads
        self._reads: dict[Stored, Read] = {}
        self._preloads: dict[str, tuple[Read, ...]] = {}  # by request that waits
        where = "disk" if below.name == "disk" else "the shared store"
        self._problem = WriteProblem(log, where, lost_with="vLLM", prefix="kvshare: ")
        self._reported: str | None = None  # the last reported reason
        self._is_given_up = False
        self._paused_until = 0.0
        self._lock = threading.Lock()
        self._readers = TierReaders(below.parts)
        self._writer = WriteBehind(self.write_due, bytes_per_s=write_bytes_per_s)
        self._writer.wake()

    def write(self, requests: Iterable[WriteRequest]) -> None:
        """Write these segments, as far as memory has them, when there is time."""
        with self._lock:
            for request in requests:
                stored = self._stored.get(request.segment_id)
                if stored is None or stored.sums is None or self._is_given_up:
                    continue
                self._due[request.segment_id] = self._described(request, stored), stored
        self._writer.wake()

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        entries = list(segment_ids)
        self.evict(entries)
        if self.below.drop(entries):
            self._writer.wake()

    def adopt(self, segments: Iterable[Segment]) -> None:
        """Make segments readable that others have written to the shared store."""
        for tier in self.below.parts if segments and not self._is_given_up else ():
            if isinstance(tier, SharedTier):
                tier.adopt(segments)

    def evict(self, segment_ids: Iterable[SegmentId]) -> None:
        entries = list(segment_ids)
        with self._lock:
            for segment_id in entries:
                due = self._due.pop(segment_id, None)
                if due is not None and segment_id == self._writing:
                    self._dropped_late.append(due[1])
                    self.hold([due[1]])
        super().evict(entries)

    def clear(self) -> None:
        """
        Drop all, on disk too, and write nothing any more: the files are of the weights of the start. What is
        in a shared store stays there for others.

        Waits for no disk. What is read or written meanwhile leaves memory when that is over.
        """
        if not self._is_given_up:
            log.warning(
                "kvshare: the weights have changed: KV on disk is deleted, and none is written until vLLM is "
                "started again"
            )
        self._is_given_up = True
        self.drop([*self.ids(), *self.below.ids()])

    def reads(self, segment_ids: Iterable[SegmentId], *, within_s: float) -> Reads | None:
        """Read the segments that are below memory into memory, if there is room; reads may be under way."""
        begun, without_room = [], []
        for segment_id in segment_ids:
            stored = self._stored.get(segment_id)
            read = None if stored is None else self._reads.get(stored)
            if read is not None and read.wait_for():
                begun.append(read)
            elif stored is not None and stored.is_saved:
                continue
            elif (segment := self.below.segment(segment_id)) is not None:
                try:
                    begun.append(self._begin_read(segment, stored))
                except MemoryError:
                    without_room.append(segment_id)
        return Reads(begun, without_room, within_s=within_s) if begun or without_room else None

    def preload(self, preloads: Preloads) -> None:
        """
        Begin reads for requests that wait. Those of requests that wait no more, and that no load waits for,
        are cancelled if they have not begun.
        """
        for request in preloads.begun:
            self.adopt(request.shared)
            reads = self.reads(request.segment_ids, within_s=math.inf)
            self._preloads[request.request_id] = () if reads is None else tuple(reads.reads)
        for request_id in preloads.over:
            for read in self._preloads.pop(request_id, ()):
                read.give_up()

    def take_disk_report(self) -> DiskReport | None:
        """
        Report what was written since the last call, and why nothing is, if that has changed. Frees memory
        that threads do not use any more.
        """
        with self._lock:
            written, self._written = self._written, []
            still = [each for each in self._dropped_late if each.segment_id == self._writing]
            free = [each for each in self._dropped_late if each not in still]
            self._dropped_late = still
        over = [stored for stored, read in self._reads.items() if read.is_over]
        for stored in over:
            del self._reads[stored]
        self.release([*free, *over])
        before, self._reported = self._reported, self._problem.reason
        return DiskReport(tuple(written), self._reported) if written or self._reported != before else None

    def close(self) -> None:
        """Write what is due, for some seconds, and stop."""
        self._writer.close(within_s=_FLUSH_S)
        self._readers.close(waits=True)
        self.below.close()
        self._on_close()
        if self._due:
            log.warning("kvshare: %d segments of KV were not written, and are lost", len(self._due))

    def write_due(self) -> int | None:
        """Delete a file without a segment, or write what is due longest. On the thread that writes."""
        if not self.below.is_swept:
            self.below.sweep()
            return 0
        if time.monotonic() < self._paused_until:
            return 0 if self.below.sweep() else None
        with self._lock:
            segment_id, due = next(iter(self._due.items()), (None, None))
            self._writing = segment_id
        if segment_id is None or due is None:
            return 0 if self.below.sweep() else None
        try:
            return self._write(*due)
        finally:
            with self._lock:
                self._writing = None

    def _write(self, segment: Segment, stored: Stored) -> int | None:
        is_whole = stored.sums is not None and _checksum(stored) == segment.checksum
        if is_whole:  # else it is damaged in memory, which a load finds, too
            try:
                self.below.write(segment, (_rows(stored),))
            except OSError as exc:
                self._problem.note(exc)
                if any(isinstance(tier, SharedTier) for tier in self.below.parts):
                    self._paused_until = time.monotonic() + _PAUSE_S
                with self._lock:  # last in turn: a segment that can never be written must not stop the others
                    if segment.segment_id in self._due:
                        self._due.move_to_end(segment.segment_id)
                # What belongs to nothing may be all that is in the way.
                return 0 if self.below.sweep() else None
            self._problem.end()
        with self._lock:
            is_held = self._due.pop(segment.segment_id, None) is not None
            if is_held and is_whole:
                self._written.append(segment.segment_id)
        if is_whole and not is_held:  # dropped meanwhile
            self.below.drop([segment.segment_id])
        self._num_written += 1
        if self._num_written % _INDEX_EVERY == 0:
            for tier in self.below.parts:
                if isinstance(tier, DiskTier):
                    tier.save_index()
        return segment.num_bytes

    def _begin_read(self, segment: Segment, cancelled: Stored | None) -> Read:
        """`cancelled`: what an earlier read was to fill, and has not left memory yet."""
        stored = self.add(segment.segment_id, segment.num_tokens) if cancelled is None else cancelled
        if cancelled in self._reads:
            self.release([stored])
        self.hold([stored])
        try:
            future = self._readers.read(segment.segment_id, partial(self._read_into, stored))
        except RuntimeError:  # no thread can be started: there is no room for one more read
            self.release([stored])
            self.evict([segment.segment_id])
            raise MemoryError("no thread to read with") from None
        read = self._reads[stored] = Read(segment.segment_id, future)
        read.wait_for()
        return read

    def _read_into(self, stored: Stored, tier: LowerTier, segment: Segment, rows: tuple[Rows, ...]) -> bool:
        """Copy rows that match their checks into memory. On a thread that reads."""
        _rows(stored)[:] = rows[0]
        stored.sums = sums(stored.rows.flatten(2), row_bytes=stored.row_bytes).numpy()
        return True

    def _described(self, request: WriteRequest, stored: Stored) -> Segment:
        return Segment(
            segment_id=request.segment_id,
            namespace=request.namespace,
            first_position=request.first_position,
            num_tokens=stored.num_tokens,
            generation=0,  # known to the proxy
            num_bytes=stored.rows.nbytes,
            checksum=combined(torch.from_numpy(stored.sums)),
        )


def _rows(stored: Stored) -> Rows:
    """Return the bytes of a segment in the arena, one layer of one head after the other."""
    found: Rows = stored.rows.flatten(2).flatten(0, 1).view(torch.uint8).numpy()
    return found


def _checksum(stored: Stored) -> int:
    return combined(sums(stored.rows.flatten(2), row_bytes=stored.row_bytes))
