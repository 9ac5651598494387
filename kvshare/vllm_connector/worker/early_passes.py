"""
Passes over placeholders that begin before all layers of their load have arrived.

    UP, WRITE   [layers 0-2][ 3-5 ][ 6-8 ][ 9-11 ] ..             the copies of a load
    VLLM              [ the pass: layer 0 ] [ 1 ] [ 2 ] [ 3 ] ..   each layer waits for its copies if needed

Only in a step without a forward pass, and for a load that is alone: then no other answer waits for the pass.
It begins when every layer is expected to arrive before its use (`paces.py`), on all ranks in the same step.
The load is reported when its job is done. If the job failed, or a sum is wrong, the pass has read wrong rows:
then the load is reported as failed, and vLLM computes the prompt into the same blocks.

If the load chooses repairs, only its first pass is early. The second one follows when the load has arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from delta_tree import Span
from kvshare.safe_logging import classes_and_places
from kvshare.vllm_connector.worker.choosing import Choosing
from kvshare.vllm_connector.worker.copying import Job
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.layer_arrivals import LayerArrivals
from kvshare.vllm_connector.worker.partial_forward import runs_of
from kvshare.vllm_connector.worker.ranks import as_one
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.start import Attached
from kvshare.vllm_connector.worker.under_way import EarlyPass, PendingLoad

log = logging.getLogger("vllm.kvshare")


@dataclass(frozen=True, slots=True, eq=False)
class _FirstPass:
    """The pass that may be early, if every segment can be read. `choosing`: None if no repairs are chosen."""

    load: PendingLoad
    choosing: Choosing | None
    spans: Sequence[Span]
    num_tokens: int

    @property
    def kept(self) -> Sequence[int]:
        return self.load.request.head_rows() if self.choosing is None else self.choosing.kept


class EarlyPasses:
    """Used by vLLM's thread. `can_listen`: whether attention can be watched, to choose repairs."""

    def __init__(
        self, attached: Attached, device: Device, reports: Reports, *, step_tokens: int, can_listen: bool
    ) -> None:
        self._cache, self._forward, self._device = attached.cache, attached.forward, device
        self._paces = reports.paces
        self._step_tokens = step_tokens
        self._can_listen = can_listen
        self._next: _FirstPass | None = None  # of the load that was asked about last

    def may_begin(self, load: PendingLoad) -> bool:
        """Return whether a load's pass can be early. The same on all ranks, while nothing is missing."""
        assert load.work is not None
        if load.early is not None or load.is_cancelled or load.work.arrivals is None:
            return False
        try:
            first = self._first(load)
        except Exception:  # noqa: BLE001  the load will fail when it has arrived, and that is logged
            return False
        return 0 < first.num_tokens <= self._step_tokens and self._forward.is_one_pass(first.spans)

    def is_due(self, load: PendingLoad, job: Job) -> bool:
        """Return whether the early pass should begin now, as far as this rank knows."""
        assert load.work is not None
        arrivals = load.work.arrivals
        if arrivals is None or not job.is_launched or job.failed or not arrivals.is_cut:
            return False
        if not load.stored_ids <= load.held.keys():
            return False
        first = self._first(load)
        listens = first.choosing is not None and first.choosing.listens
        return self._paces.are_in_time(arrivals.pending_bytes(), first.num_tokens, listens=listens)

    def begin(self, load: PendingLoad) -> None:
        """Compute the early pass of a load that is due. Called on all ranks in the same step."""
        assert load.work is not None
        assert load.work.arrivals is not None, "it is due"
        first, self._next = self._first(load), None
        began, failed = self._device.mark(), False
        try:
            with as_one("a pass over placeholders"):
                self._compute(first, load.work.arrivals)
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.error("kvshare: computing for a request failed: %s", classes_and_places(exc))
            failed = True
        load.early = EarlyPass(first.num_tokens, began, self._device.mark(), failed, first.choosing)

    def _first(self, load: PendingLoad) -> _FirstPass:
        if self._next is None or self._next.load is not load:
            request, choosing, spans = load.request, None, load.placeholders
            if request.order is not None:
                choosing = Choosing(request, request.order, frozenset(), can_listen=self._can_listen)
                spans = choosing.first_spans
            self._next = _FirstPass(load, choosing, spans, sum(map(len, spans)))
        return self._next

    def _compute(self, first: _FirstPass, arrivals: LayerArrivals) -> None:
        request, choosing = first.load.request, first.choosing
        if choosing is None or not choosing.listens:
            runs = runs_of(request, first.spans, kept=first.kept)
            self._forward.compute(runs, awaiting=arrivals.wait_for)
            return

        def arrive(layer: int) -> None:
            arrivals.wait_for(layer)
            choosing.keep(layer)

        runs = choosing.first_pass(self._cache, self._device, is_early=True)
        self._forward.compute(runs, watching=self._forward.listening, awaiting=arrive)
        choosing.end_first_pass()
