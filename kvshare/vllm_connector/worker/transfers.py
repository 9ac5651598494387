"""
Transfers next to vLLM's steps: loads of segments into blocks, saves of prompts from blocks, and drops.

Each load and each save is a job of the thread that copies, which orders its jobs by itself. A transfer counts
as finished when its job is done on every rank, so that all ranks report the same in the same step. This file
does not know what is computed for a load afterwards.

A step waits for the loads that join it (`joining_loads.py`). vLLM gives a request no block that a step in
flight writes (`Scheduler.defer_block_free`), so the copies of a load are written as soon as they arrive: only
KVShare's own use of these blocks must be over (`fence`).

While vLLM sleeps, its KV cache has no memory: transfers that begin meanwhile fail, so that vLLM computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from itertools import count

from delta_tree import SegmentId
from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest
from kvshare.vllm_connector.worker.block_fences import BlockFences
from kvshare.vllm_connector.worker.copies_in_turn import load_work, save_work
from kvshare.vllm_connector.worker.copying import CopyThread, Job, LapTimer
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.joining_loads import JoiningLoads
from kvshare.vllm_connector.worker.ranks import Agreement
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.segment_store import Stored
from kvshare.vllm_connector.worker.start import Attached
from kvshare.vllm_connector.worker.under_way import PendingLoad, PendingSave, UnderWay

log = logging.getLogger("vllm.kvshare")

_CLOSE_S = 10.0
_LOOK_S = 0.0005  # between two checks of a load whose pass may begin early
MAX_WAIT_S = 0.005  # the longest wait of a step without a forward pass; new requests wait meanwhile


class Transfers:
    """Methods run on vLLM's thread unless they say "on the thread that copies"."""

    def __init__(
        self, attached: Attached, device: Device, reports: Reports, *, drafts_late: bool = False
    ) -> None:
        self._cache, self._store = attached.cache, attached.store
        self._device = device
        self._reports = reports
        self._copies = CopyThread(device.enter_thread)
        self._numbers = count()  # of transfers: the same on all ranks
        self._under_way: dict[int, UnderWay] = {}
        self._agreement = Agreement[Hashable]()
        self._without_room: list[PendingSave] = []  # saves that wait for the memory of dropped segments
        self._joining = JoiningLoads(device, self._copies, self._store, reports)
        self._fences = BlockFences(device, drafts_late=drafts_late)
        self._is_asleep = False  # vLLM's KV cache must not be touched

    def cancel(self, request_ids: Collection[str]) -> None:
        """Cancel requests: their copies go on, as the blocks stay; their placeholders are not computed."""
        for each in self._joining.cancel(request_ids):
            self._under_way[next(self._numbers)] = each
        for load, _ in self._loads():
            load.cancel_if_in(request_ids)

    def begin_load(self, request: LoadRequest, *, joins: bool) -> None:
        """Begin a load. `joins`: it joins the current step, which waits for it; otherwise it is reported."""
        self._store.adopt(request.shared)
        reads = self._store.reads(request.stored_ids, within_s=request.reads_within_s)
        read_ids = frozenset[SegmentId]() if reads is None else reads.wanted
        found = self._store.find(request.stored_ids).items()
        load = PendingLoad(request, {key: s for key, s in found if s.is_saved or key in read_ids})
        if self._is_asleep and not joins:
            self._reports.note_load(request.request_id, load.failure())
            return
        mark = self._fences.mark_for(request.block_ids)
        load.work = load_work(self._device, self._cache, load, reads, mark=mark, is_asleep=self._is_asleep)
        num_bytes = sum(stored.num_bytes for stored in load.segments)
        job = self._copies.submit("loading a request's KV", load.work, num_bytes=num_bytes)
        self._store.hold(load.segments)
        under_way = UnderWay(load, job, is_lost=self._is_asleep)
        if joins:
            self._joining.add(under_way)
        else:
            self._under_way[next(self._numbers)] = under_way

    def fence(self, block_ids: Collection[int]) -> None:
        """Note that blocks are in use by all work up to now: later loads into them wait for it."""
        self._fences.add(block_ids)

    def begin_save(self, request: SaveRequest) -> None:
        save = PendingSave(request, self._device.mark())
        if self._is_asleep:
            self._end_save(save, is_whole=False)
        else:
            self._find_room(save)

    def drop(self, segment_ids: Iterable[SegmentId], *, evicted: Iterable[SegmentId] = ()) -> None:
        """Remove segments, so that no later load finds them. Copies under way can still use their bytes."""
        self._store.drop(segment_ids)
        self._store.evict(evicted)

    def wait_for_saves(self, request_ids: Collection[str]) -> None:
        """Wait until saves of these requests have read their blocks: others write these in this step."""
        for under_way in self._under_way.values():
            if (
                isinstance(under_way.transfer, PendingSave)
                and under_way.transfer.request.request_id in request_ids
            ):
                self._copies.wait_until_read(under_way.job)
                self.fence(under_way.transfer.request.block_ids)
        self._give_up([save for save in self._without_room if save.request.request_id in request_ids])

    def wait_for_loads(self) -> None:
        """Wait for loads, for a short time: a step without a forward pass has nothing else to do."""
        self._wait([each.job for _, each in self._loads()], MAX_WAIT_S)

    @property
    def waiting_for_disk(self) -> list[PendingLoad]:
        """Return the loads that are not lost and wait for reads from disk."""
        return [load for load, each in self._loads() if load.request.reads_within_s and not each.is_lost]

    @property
    def only_load(self) -> UnderWay | None:
        """Return the load, if it is the only one and not lost; else None. The same on all ranks."""
        loads = [each for _, each in self._loads()]
        is_one = len(loads) == 1 and not self._is_asleep and not any(self._joining)
        return loads[0] if is_one and not loads[0].is_lost else None

    def wait_until_due(self, load: UnderWay, is_due: Callable[[], bool]) -> bool:
        """Wait a short time until an early pass is due. Returns whether it is before the load arrives."""
        lap, waited = LapTimer(), 0.0
        while waited < MAX_WAIT_S:
            if is_due():
                return True
            if self._copies.wait(load.job, _LOOK_S):
                return False
            waited += lap()
        return False

    def announce(self, request_ids: Collection[str]) -> None:
        """Announce these loads to vLLM as arrived, if they are under way: they join a later step."""
        for number, each in tuple(self._under_way.items()):
            load = each.transfer
            if (
                isinstance(load, PendingLoad)
                and load.request.request_id in request_ids
                and not load.is_cancelled
            ):
                self._joining.add(self._under_way.pop(number))
                self._reports.note_arriving(load.request.request_id)

    def take_joined(self, request_ids: Sequence[str]) -> list[PendingLoad]:
        """Wait for the loads that join this step, and return them. Called on all ranks together."""
        return self._joining.take(request_ids, self._device.mark())

    def say(self) -> None:
        """Send the other ranks what is finished here. `take_arrived` must follow in the same step."""
        self._agreement.say(dict(self._said()))

    def take_arrived(self) -> list[PendingLoad]:
        """
        Take the transfers that are finished on every rank, in the order in which they were begun.

        Returns:  the loads whose copies are written. Saves and failed loads are reported
        """
        facts = set(self._agreement.known())
        arrived = []
        for number in self._finished(facts):
            under_way = self._under_way.pop(number)
            transfer, is_whole = under_way.transfer, (number, "whole") in facts and not under_way.is_lost
            self._store.release(transfer.segments)
            self._reports.times.note(transfer.request.request_id, under_way.job.seconds)
            if isinstance(transfer, PendingLoad):
                self._reports.note_pace(transfer, under_way.job)
            if isinstance(transfer, PendingSave):
                self._end_save(transfer, is_whole=is_whole)
            elif is_whole:
                transfer.unreadable = frozenset(s for s in transfer.wanted if (number, s) not in facts)
                arrived.append(transfer)
                self._reports.note_copied(transfer.request)
            else:  # its slots may hold anything
                self._reports.note_load(transfer.request.request_id, transfer.failure())
        waiting, self._without_room = self._without_room, []
        for save in waiting:
            self._find_room(save)
        return arrived

    def forget_segments(self) -> None:
        """Fail all transfers under way, and drop all segments. Waits for copies."""
        for each in (*self._ended(), *self._joining.ended()):
            each.is_lost = True
        self._give_up(self._without_room)
        self._store.clear()

    def fall_asleep(self) -> None:
        """Finish all copies before vLLM sleeps. Loads fail, because the cache loses what they wrote."""
        self._is_asleep = True
        for each in (*self._ended(), *self._joining.ended()):
            each.is_lost = each.is_lost or isinstance(each.transfer, PendingLoad)
        self._give_up(self._without_room)

    def wake_up(self) -> None:
        """Go on after a sleep: the KV cache, perhaps other tensors now, must have the layout from before."""
        if not self._cache.has_same_form:
            log.error(
                "kvshare: since vLLM slept, its KV cache has another layout than at the self-test: no prompt "
                "is loaded or stored until it is started again"
            )
            return
        self._is_asleep = False

    def close(self) -> None:
        """Stop. Waits for copies under way, because their memory is about to be freed."""
        under_way = (*self._under_way.values(), *self._joining)
        self._wait([each.job for each in under_way], _CLOSE_S)
        self._copies.close()
        self._store.close()

    def _wait(self, jobs: Iterable[Job], max_wait_s: float) -> None:
        lap, waited = LapTimer(), 0.0
        for job in jobs:
            if waited < max_wait_s:
                self._copies.wait(job, max_wait_s - waited)
                waited += lap()

    def _loads(self) -> Iterator[tuple[PendingLoad, UnderWay]]:
        for each in self._under_way.values():
            if isinstance(each.transfer, PendingLoad):
                yield each.transfer, each

    def _said(self) -> Iterator[tuple[Hashable, bool]]:
        """Yield what has happened here to the transfers under way; the same keys on all ranks."""
        for number, under_way in self._under_way.items():
            is_done = under_way.job.is_done
            yield (number, "done"), is_done
            yield (number, "whole"), is_done and not under_way.job.failed
            if isinstance(load := under_way.transfer, PendingLoad):
                for segment_id in load.wanted:
                    yield (number, segment_id), is_done and load.is_readable(segment_id)

    def _finished(self, facts: Collection[Hashable]) -> list[int]:
        """Return the numbers of finished transfers. A request's saves finish in order: the last ends it."""
        finished, unfinished = [], set[str]()
        for number, under_way in self._under_way.items():
            request_id = under_way.transfer.request.request_id
            is_later_save = isinstance(under_way.transfer, PendingSave) and request_id in unfinished
            if (number, "done") in facts and not is_later_save:
                finished.append(number)
            elif isinstance(under_way.transfer, PendingSave):
                unfinished.add(request_id)
        return finished

    def _ended(self) -> Iterable[UnderWay]:
        """Wait until all copies of this rank have ended, and return the transfers under way."""
        self._copies.wait_for_all([each.job for each in self._under_way.values()])
        return self._under_way.values()

    def _find_room(self, save: PendingSave) -> None:
        """Begin a save if there is room; let it wait if there will be; else it fails when its turn comes."""
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
        work = save_work(self._device, self._cache, save, spans)
        num_bytes = sum(stored.num_bytes for stored in targets.values())
        job = self._copies.submit("saving a prompt's KV", work, num_bytes=num_bytes, is_save=True)
        self._store.hold(save.segments)
        self._under_way[next(self._numbers)] = UnderWay(save, job)

    def _give_up(self, saves: Sequence[PendingSave]) -> None:
        """Fail saves that wait for room, because their blocks are about to be overwritten or freed."""
        for save in list(saves):
            self._without_room.remove(save)
            self._end_save(save, is_whole=False)

    def _end_save(self, save: PendingSave, *, is_whole: bool) -> None:
        has_failed = not is_whole or not save.has_room
        if has_failed:
            self.drop(save.targets)
        self._reports.note_save(save.request, has_failed=has_failed)
