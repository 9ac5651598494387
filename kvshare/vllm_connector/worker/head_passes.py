"""
Passes over what comes before the first copy of loads that wait for a disk.

    the disk     [ reads ................................ ]
    VLLM         [ head, 8,192 tokens ][ a step ][ head ..]   [ the rest ]
    UP, WRITE                                             [ copies ]

What a token attends to stands before it, so nothing of the head depends on what is read. A plan leaves as
much of the beginning to be computed as takes as long as reading the rest (`kvshare/sharing/splitting.py`).

One pass at a time, so that steps of other requests come in between, as between the chunks of a prefill. What
is not computed when the load has arrived, or what a pass failed to compute, is computed with its other
placeholders.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from kvshare.safe_logging import classes_and_places
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.partial_forward import PartialForward
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.runs import Run, runs_of, split
from kvshare.vllm_connector.worker.under_way import PendingLoad

log = logging.getLogger("vllm.kvshare")

_POLL_S = 0.0005


class HeadPasses:
    """Used by vLLM's thread only, where there is a single rank: no other has a disk."""

    def __init__(
        self, forward: PartialForward, device: Device, reports: Reports, *, step_tokens: int
    ) -> None:
        self._forward, self._device, self._reports = forward, device, reports
        self._step_tokens = step_tokens
        self._last: Any = None  # mark of the device after the last pass

    def compute(self, loads: Iterable[PendingLoad]) -> set[int]:
        """Return the next part of these loads' heads. Returns the blocks that are written."""
        if self._is_busy():
            return set()
        due = {load.request.request_id: load for load in loads if _has_head(load)}
        runs = [run for load in due.values() for run in runs_of(load.request, [load.request.head])]
        first = next(split(runs, self._step_tokens), None) if runs else None
        if first is None:
            return set()
        began = self._device.mark()
        try:
            self._forward.compute(first)
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.error("kvshare: computing for a request failed: %s", classes_and_places(exc))
            for load in due.values():
                load.computes_head = False
            return {block_id for run in first for block_id in run.block_ids}
        self._last = self._device.mark()
        self._reports.note_ahead(began, self._last, _advanced(due, first))
        return {block_id for run in first for block_id in run.block_ids}

    def wait(self, timeout_s: float) -> bool:
        """Wait a short time for the last pass to end. Returns whether one is computed."""
        if not self._is_busy():
            return False
        until = time.perf_counter() + timeout_s
        while self._is_busy() and time.perf_counter() < until:
            time.sleep(_POLL_S)
        return True

    def _is_busy(self) -> bool:
        if self._last is not None and self._device.is_past(self._last):
            self._last = None
        return self._last is not None


def _has_head(load: PendingLoad) -> bool:
    """Return whether something of it can be computed before it has arrived."""
    request = load.request
    if load.work is None or load.work.arrivals is not None:  # its pass begins early, see `early_passes.py`
        return False
    may_compute = load.computes_head and not load.is_cancelled and not request.media
    return may_compute and bool(request.reads_within_s) and len(request.head) > 0


def _advanced(due: dict[str, PendingLoad], runs: Iterable[Run]) -> Counter[str]:
    """Note that these are computed: the loads begin after them. Returns the tokens of each."""
    number, loads = Counter[str](), {load.request.block_ids: load for load in due.values()}
    for run in runs:
        load = loads[run.block_ids]
        load.request = replace(load.request, start=run.span.end)
        number[load.request.request_id] += len(run.span)
    return number
