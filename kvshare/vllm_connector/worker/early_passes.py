"""
Passes over placeholders that begin before all layers of their load have arrived.

    UP, WRITE   [layers 0-2][ 3-5 ][ 6-8 ][ 9-11 ] ..             the copies of a load
    VLLM              [ the pass: layer 0 ] [ 1 ] [ 2 ] [ 3 ] ..   each layer waits for its copies if needed

Only in a step without a forward pass, and for a load that is alone: then no other answer waits for the pass.
It begins when every layer is expected to arrive before its use (`paces.py`), on all ranks in the same step.
The load is reported when its job is done. If the job failed, or a sum is wrong, the pass has read wrong rows:
then the load is reported as failed, and vLLM computes the prompt into the same blocks.

If the load chooses repairs, its first pass is early. If that ends before the last layers (`choosing.py`), and
its results arrive before them, the second one is early, too. Otherwise it follows when the load has arrived.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from delta_tree import Span
from kvshare.safe_logging import classes_and_places
from kvshare.vllm_connector.worker.choosing import Choosing
from kvshare.vllm_connector.worker.copying import Job
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.layer_arrivals import LayerArrivals
from kvshare.vllm_connector.worker.ranks import as_one
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.runs import runs_of
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
        """Return whether a load's next pass can be early. Ranks agree, while nothing is missing."""
        assert load.work is not None
        if load.is_cancelled or load.work.arrivals is None:
            return False
        if (early := load.early) is not None:
            choosing = early.choosing
            return choosing is not None and choosing.is_brief and choosing.listens and not early.failed
        try:
            first = self._first(load)
        except Exception:  # noqa: BLE001  the load will fail when it has arrived, and that is logged
            return False
        return self._is_one_pass(first.spans)

    def is_due(self, load: PendingLoad, job: Job) -> bool:
        """Return whether the early pass should begin now, as far as this rank knows."""
        assert load.work is not None
        arrivals = load.work.arrivals
        if arrivals is None or not job.is_launched or job.failed or not arrivals.is_cut:
            return False
        if load.early is not None:
            return self._second_is_due(load.early.choosing, arrivals)
        if not load.stored_ids <= load.held.keys():
            return False
        first = self._first(load)
        pending, choosing = arrivals.pending_bytes(), first.choosing
        listens = choosing is not None and choosing.listens
        if choosing is not None and (needed := choosing.layers_of_first(len(pending))) is not None:
            pending[needed:] = [0] * (len(pending) - needed)
        return self._paces.are_in_time(pending, first.num_tokens, listens=listens)

    def _second_is_due(self, choosing: Choosing | None, arrivals: LayerArrivals) -> bool:
        assert choosing is not None, "only loads that choose have a second pass"
        try:
            spans = choosing.early_second()
        except Exception:  # noqa: BLE001  it is tried again when the load has arrived, and that is logged
            return False
        if spans is None or not self._is_one_pass(spans):
            return False
        return self._paces.are_in_time(arrivals.pending_bytes(), sum(map(len, spans)))

    def begin(self, load: PendingLoad) -> None:
        """Compute the early pass of a load that is due. Called on all ranks in the same step."""
        assert load.work is not None
        arrivals = load.work.arrivals
        assert arrivals is not None, "it is due"
        if load.early is not None:
            load.early = replace(load.early, second=self._second(load.early, arrivals))
            return
        first, self._next = self._first(load), None
        early = self._measured(first.num_tokens, arrivals, lambda: self._compute(first, arrivals))
        if (choosing := first.choosing) is not None:
            num_layers = self._cache.kv_layout.num_layers
            share = (choosing.layers_of_first(num_layers) or num_layers) / num_layers
            early = replace(early, share=share, listened=choosing.listens, choosing=choosing)
        load.early = early

    def _second(self, early: EarlyPass, arrivals: LayerArrivals) -> EarlyPass:
        choosing = early.choosing
        assert choosing is not None, "it is due"
        runs = choosing.second_pass(choosing.end_first_pass())
        num_tokens = sum(len(run.span) for run in runs)
        return self._measured(
            num_tokens, arrivals, lambda: self._forward.compute(runs, awaiting=arrivals.wait_for)
        )

    def _measured(self, num_tokens: int, arrivals: LayerArrivals, compute: Callable[[], None]) -> EarlyPass:
        began, num_waits, failed = self._device.mark(), arrivals.num_waits, False
        try:
            with as_one("a pass over placeholders"):
                compute()
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.error("kvshare: computing for a request failed: %s", classes_and_places(exc))
            failed = True
        waits = slice(num_waits, arrivals.num_waits)
        return EarlyPass(num_tokens, began, self._device.mark(), failed, waits)

    def _is_one_pass(self, spans: Sequence[Span]) -> bool:
        return 0 < sum(map(len, spans)) <= self._step_tokens and self._forward.is_one_pass(spans)

    def _first(self, load: PendingLoad) -> _FirstPass:
        if self._next is None or self._next.load is not load:
            request, choosing, spans = load.request, None, load.placeholders
            if request.order is not None:
                choosing = Choosing(
                    request,
                    request.order,
                    frozenset(),
                    can_listen=self._can_listen,
                    may_stop=self._forward.may_stop,
                )
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
