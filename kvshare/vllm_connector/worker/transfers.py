"""
Copies next to vLLM's steps: segments into the blocks of loads, prompts out of blocks, and segments dropped.

Each load and each save is a job of the thread that copies, which makes them in an order of its own. One
counts as finished when its job is done on every rank, so that all ranks report the same in the same step.
What is computed for a load afterwards is not known here.

While vLLM sleeps, its KV cache has no memory: what is begun meanwhile fails, so that vLLM computes it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from typing import Any

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.metadata import LoadRequest, LoadResult, SaveRequest
from kvshare.vllm_connector.worker.copy_writer import RowCopy
from kvshare.vllm_connector.worker.copying import CopyThread, Job, LapTimer
from kvshare.vllm_connector.worker.device import Device, LoadWork
from kvshare.vllm_connector.worker.ranks import Agreement
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.segment_store import Stored
from kvshare.vllm_connector.worker.start import Attached

log = logging.getLogger("vllm.kvshare")

_CLOSE_S = 10.0
MAX_WAIT_S = 0.005  # how long a step without a forward pass waits for copies; new requests wait meanwhile


@dataclass(eq=False)
class PendingLoad:
    """A load under way. `unreadable`: wanted segments that some rank cannot read, known when it arrives."""

    request: LoadRequest
    held: Mapping[SegmentId, Stored]  # of the wanted segments
    work: LoadWork | None = None
    unreadable: frozenset[SegmentId] = frozenset()
    is_cancelled: bool = False

    @cached_property
    def wanted(self) -> tuple[SegmentId, ...]:
        """In the same order on all ranks. Every step asks for it."""
        return tuple(sorted({copy.segment_id for copy in self.request.copies}))

    @property
    def segments(self) -> Collection[Stored]:
        """That its job reads."""
        return self.held.values()

    def cancel_if_in(self, request_ids: Collection[str]) -> None:
        self.is_cancelled = self.is_cancelled or self.request.request_id in request_ids

    def is_readable(self, segment_id: SegmentId) -> bool:
        """Whether this rank has written the right bytes. Known when its job is done."""
        assert self.work is not None
        return segment_id in self.held and segment_id not in self.work.damaged

    def failure(self) -> LoadResult:
        """vLLM must compute the request's prompt."""
        return LoadResult(True, self.unreadable)


@dataclass(eq=False)
class _Save:
    request: SaveRequest
    mark: Any
    targets: Mapping[SegmentId, Stored] = field(default_factory=dict)
    has_room: bool = True

    @property
    def segments(self) -> Collection[Stored]:
        """That its job writes."""
        return self.targets.values()


@dataclass(eq=False)
class _UnderWay:
    """`is_lost`: whatever was copied, it counts as failed. It is set on all ranks between the same steps."""

    transfer: PendingLoad | _Save
    job: Job
    is_lost: bool = False


class Transfers:
    """Methods run on vLLM's thread unless they say "on the thread that copies"."""

    def __init__(self, attached: Attached, device: Device, reports: Reports) -> None:
        self._cache, self._store = attached.cache, attached.store
        self._device = device
        self._reports = reports
        self._copies = CopyThread(device.enter_thread)
        self._numbers = count()  # of transfers: the same on all ranks
        self._under_way: dict[int, _UnderWay] = {}
        self._agreement = Agreement[Hashable]()
        self._without_room: list[_Save] = []  # until the memory of dropped segments is free
        self._is_asleep = False  # vLLM's KV cache must not be touched

    def cancel(self, request_ids: Collection[str]) -> None:
        """Their loads go on, as their blocks stay; what they have loaded is not computed further."""
        for load, _ in self._loads():
            load.cancel_if_in(request_ids)

    def begin_load(self, request: LoadRequest) -> None:
        found = self._store.find(copy.segment_id for copy in request.copies)
        load = PendingLoad(request, {key: stored for key, stored in found.items() if stored.sums is not None})
        if self._is_asleep:
            self._reports.note_load(request.request_id, load.failure())
            return
        load.work = self._device.load(self._cache, partial(self._row_copies, load), mark=self._device.mark())
        num_bytes = sum(stored.rows.nbytes for stored in load.segments)
        self._begin(load, self._copies.submit("loading a request's KV", load.work, num_bytes=num_bytes))

    def begin_save(self, request: SaveRequest) -> None:
        save = _Save(request, self._device.mark())
        if self._is_asleep:
            self._end_save(save, is_whole=False)
        else:
            self._find_room(save)

    def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        """No load finds them any more. Copies under way, on any rank, still have their bytes."""
        self._store.drop(segment_ids)

    def wait_for_saves(self, request_ids: Collection[str]) -> None:
        """Other requests write their blocks in this step."""
        for each in self._under_way.values():
            if isinstance(each.transfer, _Save) and each.transfer.request.request_id in request_ids:
                self._copies.wait_until_read(each.job)
        self._give_up([save for save in self._without_room if save.request.request_id in request_ids])

    def wait_for_loads(self) -> None:
        """For a short time: in a step without a forward pass there is nothing else to do."""
        self._wait([each.job for _, each in self._loads()], MAX_WAIT_S)

    def say(self) -> None:
        """Send the other ranks what is finished here. `take_arrived` must follow in the same step."""
        self._agreement.say(dict(self._said()))

    def take_arrived(self) -> list[PendingLoad]:
        """
        Take the transfers that are finished on every rank, in the order in which they were begun.

        Returns:  the loads whose copies are written. All others are reported
        """
        known = set(self._agreement.known())
        arrived = []
        for number in self._finished(known):
            each = self._under_way.pop(number)
            transfer, is_whole = each.transfer, (number, "whole") in known and not each.is_lost
            self._store.release(transfer.segments)
            self._reports.times.note(transfer.request.request_id, each.job.seconds)
            if isinstance(transfer, _Save):
                self._end_save(transfer, is_whole=is_whole)
            elif is_whole:
                transfer.unreadable = frozenset(s for s in transfer.wanted if (number, s) not in known)
                arrived.append(transfer)
            else:  # its slots may hold anything
                self._reports.note_load(transfer.request.request_id, transfer.failure())
        waiting, self._without_room = self._without_room, []
        for save in waiting:
            self._find_room(save)
        return arrived

    def forget_segments(self) -> None:
        """Fail what is under way, and drop all segments."""
        for each in self._ended():
            each.is_lost = True
        self._give_up(self._without_room)
        self._store.clear()

    def fall_asleep(self) -> None:
        """What is being saved is whole when this returns. What was loaded is lost with the cache."""
        self._is_asleep = True
        for each in self._ended():
            each.is_lost = each.is_lost or isinstance(each.transfer, PendingLoad)
        self._give_up(self._without_room)

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
        self._wait([each.job for each in self._under_way.values()], _CLOSE_S)
        self._copies.close()

    def _wait(self, jobs: Iterable[Job], max_wait_s: float) -> None:
        lap, waited = LapTimer(), 0.0
        for job in jobs:
            if waited < max_wait_s:
                self._copies.wait(job, max_wait_s - waited)
                waited += lap()

    def _begin(self, transfer: PendingLoad | _Save, job: Job) -> None:
        self._store.hold(transfer.segments)
        self._under_way[next(self._numbers)] = _UnderWay(transfer, job)

    def _loads(self) -> Iterator[tuple[PendingLoad, _UnderWay]]:
        for each in self._under_way.values():
            if isinstance(each.transfer, PendingLoad):
                yield each.transfer, each

    def _said(self) -> Iterator[tuple[Hashable, bool]]:
        """What this rank knows of the transfers under way, the same keys on all ranks."""
        for number, each in self._under_way.items():
            is_done = each.job.is_done
            yield (number, "done"), is_done
            yield (number, "whole"), is_done and not each.job.failed
            if isinstance(load := each.transfer, PendingLoad):
                for segment_id in load.wanted:
                    yield (number, segment_id), is_done and load.is_readable(segment_id)

    def _finished(self, known: Collection[Hashable]) -> list[int]:
        """Those that are done. A request's saves are finished in order: the last one ends the request."""
        finished, unfinished = [], set[str]()
        for number, each in self._under_way.items():
            request_id = each.transfer.request.request_id
            is_later_save = isinstance(each.transfer, _Save) and request_id in unfinished
            if (number, "done") in known and not is_later_save:
                finished.append(number)
            elif isinstance(each.transfer, _Save):
                unfinished.add(request_id)
        return finished

    def _ended(self) -> Iterable[_UnderWay]:
        """What is under way, when all copies of this rank have ended."""
        for each in self._under_way.values():
            self._copies.hurry(each.job)
        for each in self._under_way.values():
            self._copies.wait(each.job)
        return self._under_way.values()

    def _find_room(self, save: _Save) -> None:
        """Begin a save if there is room, let it wait if there will be."""
        if self._without_room:  # in order, see `_finished`
            self._without_room.append(save)
            return
        targets: dict[SegmentId, Stored] = {}
        try:
            for segment_id, span in save.request.spans:
                targets[segment_id] = self._store.add(segment_id, len(span))
        except MemoryError as exc:
            self.drop(targets)
            if self._store.has_leaving:
                self._without_room.append(save)
                return
            log.warning("kvshare: a prompt is not stored: %s. Raise --kv-bytes for more room", exc)
            targets, save.has_room = {}, False
        save.targets = targets
        spans = [(targets[segment_id], span) for segment_id, span in save.request.spans if targets]
        work = self._device.save(self._cache, save.request.block_ids, spans, mark=save.mark)
        num_bytes = sum(stored.rows.nbytes for stored in targets.values())
        self._begin(
            save, self._copies.submit("saving a prompt's KV", work, num_bytes=num_bytes, is_save=True)
        )

    def _give_up(self, saves: Sequence[_Save]) -> None:
        """Their blocks are lost before there was room."""
        for save in list(saves):
            self._without_room.remove(save)
            self._end_save(save, is_whole=False)

    def _end_save(self, save: _Save, *, is_whole: bool) -> None:
        has_failed = not is_whole or not save.has_room
        if has_failed:
            self.drop(save.targets)
        self._reports.note_save(save.request, has_failed=has_failed)

    def _row_copies(self, load: PendingLoad) -> list[RowCopy]:
        """What is to be copied, keys rotated to their new positions. On the thread that copies."""
        copies = []
        for copy, target in load.request.targets():
            if (stored := load.held.get(copy.segment_id)) is not None:
                start = copy.offset + target.start - copy.target_start
                slots = self._cache.slot_numbers(load.request.block_ids, target)
                copies.append(RowCopy(stored, Span(start, start + len(target)), copy.shift, slots))
        return copies
