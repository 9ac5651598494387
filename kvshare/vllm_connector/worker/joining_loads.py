"""
Loads that join a step: vLLM counts them as arrived before they have, and the worker waits for them before the
step's forward pass. Until then, other requests of that step may already refer to their blocks.

A load that copies from blocks only needs no verification: its pass is launched as soon as its copies are, and
the device waits for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from kvshare.vllm_connector.worker.copying import CopyThread, Job, LapTimer
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.ranks import agreed
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.segment_store import SegmentStore
from kvshare.vllm_connector.worker.under_way import PendingLoad, UnderWay

_LOOK_S = 0.001  # between two queries of vLLM's stream, which should not run idle


class JoiningLoads:
    """Used by vLLM's thread, in the same order on all ranks."""

    def __init__(self, device: Device, copies: CopyThread, store: SegmentStore, reports: Reports) -> None:
        self._device, self._copies, self._store, self._reports = device, copies, store, reports
        self._loads: dict[str, UnderWay] = {}

    def __iter__(self) -> Iterator[UnderWay]:
        return iter(self._loads.values())

    def add(self, load: UnderWay) -> None:
        self._copies.hurry(load.job)
        self._loads[load.transfer.request.request_id] = load

    def cancel(self, request_ids: Collection[str]) -> list[UnderWay]:
        """Take out the loads of requests that have ended: they join no step, but are reported."""
        return [self._loads.pop(request_id) for request_id in tuple(self._loads) if request_id in request_ids]

    def ended(self) -> Sequence[UnderWay]:
        """Wait until all copies of this rank have ended, and return all loads."""
        self._copies.wait_for_all([each.job for each in self])
        return tuple(self)

    def take(self, request_ids: Sequence[str], reached: Any) -> list[PendingLoad]:
        """
        Wait for loads. `reached`: the mark at which vLLM's stream runs out of work.

        Returns:  the loads, with the segments that are unreadable on any rank (all, if the load failed there)
        """
        loads = {load: self._found(load) for load in (self._arrived(name, reached) for name in request_ids)}
        is_there_everywhere = iter(agreed([is_there for parts in loads.values() for is_there in parts]))
        for load in loads:
            load.has_failed = not next(is_there_everywhere)
            load.unreadable = frozenset(
                [segment_id for segment_id in load.wanted if not next(is_there_everywhere)]
            )
        return list(loads)

    def _arrived(self, request_id: str, reached: Any) -> PendingLoad:
        under_way = self._loads.pop(request_id)
        load = under_way.transfer
        assert isinstance(load, PendingLoad), "saves do not join a step"
        if load.is_from_blocks:
            self._copies.wait_until_read(under_way.job)
            self._reports.times.note_later(request_id, partial(_seconds, under_way.job))
        else:
            load.late_s = self._wait(under_way.job, reached)
            self._reports.times.note(request_id, under_way.job.seconds)
        load.has_failed = under_way.job.failed or under_way.is_lost
        self._store.release(load.segments)
        return load

    def _found(self, load: PendingLoad) -> list[bool]:
        """Return whether a load is whole on this rank, then the same for each segment that it wants."""
        is_whole = not load.has_failed
        return [is_whole, *(is_whole and load.is_readable(wanted) for wanted in load.wanted)]

    def _wait(self, job: Job, reached: Any) -> float:
        """Wait for a job. Returns for how many seconds vLLM's stream had nothing to do meanwhile."""
        while not self._device.is_past(reached):
            if self._copies.wait(job, _LOOK_S):
                return 0.0
        lap = LapTimer()
        self._copies.wait(job)
        return lap()


def _seconds(job: Job) -> Mapping[str, float] | None:
    """Return the seconds of a job by stage; None while it is not done."""
    return job.seconds if job.is_done else None
