"""
Copies next to vLLM's steps: segments into the blocks of loads, prompts out of blocks, and segments dropped.

Each is a job of the thread that copies, which runs them in order. A transfer counts as finished when its job
is done on every rank, so that all ranks report the same in the same step. What is computed for a load
afterwards is not known here.

While vLLM sleeps, its KV cache has no memory: what is begun meanwhile fails, so that vLLM computes it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.metadata import LoadRequest, LoadResult, SaveRequest
from kvshare.vllm_connector.worker.copy_writer import RowCopy, write_copies
from kvshare.vllm_connector.worker.copying import CopyThread, Job, LapTimer
from kvshare.vllm_connector.worker.device import Device, batches
from kvshare.vllm_connector.worker.ranks import agreed
from kvshare.vllm_connector.worker.reports import SAVE, VERIFY, WRITE, Reports
from kvshare.vllm_connector.worker.segment_store import Stored
from kvshare.vllm_connector.worker.start import Attached

log = logging.getLogger("vllm.kvshare")

MAX_WAIT_S = 0.005  # how long a step without a forward pass waits for copies; new requests wait meanwhile


@dataclass(eq=False)
class PendingLoad:
    """A load under way. `readable`: the wanted segments whose checksums are right, on this rank."""

    request: LoadRequest
    wanted: frozenset[SegmentId]
    readable: set[SegmentId] = field(default_factory=set)
    unreadable: frozenset[SegmentId] = frozenset()  # on any rank; known when all copies have arrived
    is_cancelled: bool = False

    def cancel_if_in(self, request_ids: Collection[str]) -> None:
        self.is_cancelled = self.is_cancelled or self.request.request_id in request_ids

    def failure(self) -> LoadResult:
        """vLLM must compute the request's prompt."""
        return LoadResult(True, self.unreadable)


class _Drop(NamedTuple):
    """Segments that no load finds any more. Their memory is free when all ranks have made earlier copies."""

    segments: Sequence[Stored]


@dataclass(eq=False)
class _Save:
    request: SaveRequest
    targets: Mapping[SegmentId, Stored]

    @property
    def has_room(self) -> bool:
        return len(self.targets) == len(self.request.spans)


class Transfers:
    """Methods run on vLLM's thread unless they say "on the thread that copies"."""

    def __init__(self, attached: Attached, device: Device, reports: Reports) -> None:
        self._cache, self._store = attached.cache, attached.store
        self._shares_memory = attached.shares_memory
        self._device = device
        self._reports = reports
        self._copies = CopyThread()
        self._copying: deque[tuple[PendingLoad | _Save | _Drop, Job]] = deque()  # in the order of the jobs
        self._is_asleep = False  # vLLM's KV cache must not be touched

    def cancel(self, request_ids: Collection[str]) -> None:
        """Their loads go on, as their blocks stay; what they have loaded is not computed further."""
        for transfer, _ in self._copying:
            if isinstance(transfer, PendingLoad):
                transfer.cancel_if_in(request_ids)

    def begin_load(self, request: LoadRequest) -> None:
        wanted = frozenset(copy.segment_id for copy in request.copies)
        load = PendingLoad(request, wanted)
        if self._is_asleep:
            self._reports.note_load(request.request_id, load.failure())
            return
        work = partial(self._write_copies, load, self._store.find(wanted), self._device.mark())
        self._copying.append((load, self._copies.submit(Job("loading a request's KV", work))))

    def begin_save(self, request: SaveRequest) -> None:
        targets: dict[SegmentId, Stored] = {}
        if self._is_asleep:
            self._end_save(_Save(request, targets), is_whole=False)
            return
        try:
            for segment_id, span in request.spans:
                targets[segment_id] = self._store.add(segment_id, len(span))
        except MemoryError as exc:
            log.warning("kvshare: a prompt is not stored: %s. Raise --kv-bytes for more room", exc)
            self.drop(targets)
            targets = {}
        save = _Save(request, targets)
        work = partial(self._copy_out, save, self._device.mark())
        self._copying.append((save, self._copies.submit(Job("saving a prompt's KV", work))))

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """Free them: at once, as copies run in order; if ranks share memory, when all have copied so far."""
        if not (segments := self._store.take(segment_ids)):
            return
        if self._shares_memory and self._copying:
            self._copying.append((_Drop(segments), self._copies.submit(Job("dropping", dict))))
        else:
            self._store.free(segments)

    def wait_for_saves(self, request_ids: Collection[str]) -> None:
        """Other requests write their blocks in this step."""
        for transfer, job in self._copying:
            if isinstance(transfer, _Save) and transfer.request.request_id in request_ids:
                job.wait()

    def wait_for_loads(self) -> None:
        """For a short time: in a step without a forward pass there is nothing else to do."""
        lap, waited = LapTimer(), 0.0
        for transfer, job in self._copying:
            if isinstance(transfer, PendingLoad) and waited < MAX_WAIT_S:
                job.wait(MAX_WAIT_S - waited)
                waited += lap()

    def take_arrived(self) -> list[PendingLoad]:
        """
        Take the transfers that are finished on every rank, in order, so that all ranks take the same.

        Returns:  the loads whose copies are written. All others are reported
        """
        done = agreed([job.is_done for _, job in self._copying])
        count = done.index(False) if False in done else len(done)
        finished = [self._copying.popleft() for _ in range(count)]
        are_whole = agreed([not job.failed for _, job in finished])
        unreadable = _unreadable([transfer for transfer, _ in finished if isinstance(transfer, PendingLoad)])
        arrived = []
        for (transfer, job), is_whole in zip(finished, are_whole, strict=True):
            if isinstance(transfer, _Drop):
                self._store.free(transfer.segments)
                continue
            self._reports.times.note(transfer.request.request_id, job.seconds)
            if isinstance(transfer, _Save):
                self._end_save(transfer, is_whole=is_whole)
            elif is_whole:
                transfer.unreadable = unreadable[transfer]
                arrived.append(transfer)
            else:  # its slots may hold anything
                self._reports.note_load(transfer.request.request_id, transfer.failure())
        return arrived

    def forget_segments(self) -> None:
        """Fail what is under way, and drop all segments."""
        self._end()
        for _, job in self._copying:
            job.failed = True
        self._copying = deque(entry for entry in self._copying if not isinstance(entry[0], _Drop))
        self._store.clear()

    def fall_asleep(self) -> None:
        """What is being saved is whole when this returns. What was loaded is lost with the cache."""
        self._is_asleep = True
        self._end()

    def wake_up(self) -> None:
        """The KV cache has memory again, perhaps other tensors."""
        if not self._cache.has_same_form:
            log.error(
                "kvshare: since vLLM slept, its KV cache has another layout than at the self-test: no prompt "
                "is loaded or stored until it is started again"
            )
            return
        self._is_asleep = False

    def close(self) -> None:
        """Waits for copies under way, whose memory is about to be freed."""
        self._copies.close()

    def _end(self) -> None:
        """Wait for all copies, and fail the loads. Saves are complete then."""
        for transfer, job in self._copying:
            job.wait()
            job.failed = job.failed or isinstance(transfer, PendingLoad)

    def _end_save(self, save: _Save, *, is_whole: bool) -> None:
        has_failed = not is_whole or not save.has_room
        if has_failed:
            self.drop(save.targets)
        self._reports.note_save(save.request, has_failed=has_failed)

    def _write_copies(
        self, load: PendingLoad, held: Mapping[SegmentId, Stored], mark: object
    ) -> Mapping[str, float]:
        """Write all copies, keys rotated to their new positions. On the thread that copies."""
        lap = LapTimer()
        load.readable = self._readable(held)
        verify_s = lap()
        copies = []
        for copy, target in load.request.targets():
            if copy.segment_id in load.readable:
                start = copy.offset + target.start - copy.target_start
                slots = self._cache.slot_numbers(load.request.block_ids, target)
                source, rows = Span(start, start + len(target)), held[copy.segment_id].rows
                copies.append(RowCopy(rows, source, copy.shift, slots))
        prepare_s = lap()
        write_s = self._device.run_after(mark, lambda: write_copies(self._cache, self._device, copies))
        return {VERIFY: verify_s, WRITE: prepare_s + write_s}

    def _readable(self, held: Mapping[SegmentId, Stored]) -> set[SegmentId]:
        return {segment_id for segment_id, stored in held.items() if stored.is_whole}

    def _copy_out(self, save: _Save, mark: object) -> Mapping[str, float]:
        """Copy rows from vLLM's blocks into extents. On the thread that copies."""
        spans, rows = dict(save.request.spans), [stored.rows for stored in save.targets.values()]

        def copy(batch: slice) -> None:
            staged = self._device.room_for(rows[batch])
            batch_spans = [spans[segment_id] for segment_id in list(save.targets)[batch]]
            self._cache.gather(save.request.block_ids, batch_spans, staged)
            self._device.to_host(staged, rows[batch])

        copy_s = sum(self._device.run_after(mark, partial(copy, batch)) for batch in batches(rows))
        lap = LapTimer()
        for stored in save.targets.values():
            stored.checksum = stored.computed_checksum()
        return {SAVE: copy_s + lap()} if rows else {}


def _unreadable(loads: Sequence[PendingLoad]) -> dict[PendingLoad, frozenset[SegmentId]]:
    """The segments of each load that some rank cannot read."""
    segments = [(load, segment_id) for load in loads for segment_id in sorted(load.wanted)]
    readable = agreed([segment_id in load.readable for load, segment_id in segments])
    gone = [entry for entry, is_readable in zip(segments, readable, strict=True) if not is_readable]
    return {load: frozenset(segment_id for owner, segment_id in gone if owner is load) for load in loads}
