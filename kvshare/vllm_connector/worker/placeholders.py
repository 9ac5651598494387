"""
Computes what no copy covers: the placeholders of loads whose copies are written, within the step's budget.

vLLM's own token budget does not count this, so a step takes only as many loads as fit; the others wait, in
the order of their arrival. Where a load has a repair order, repairs are chosen and computed, too.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from kvshare.safe_logging import classes_and_places
from kvshare.sharing.selection import RepairChoice
from kvshare.vllm_connector.metadata import LoadResult
from kvshare.vllm_connector.worker.choosing import Choosing
from kvshare.vllm_connector.worker.device import Device
from kvshare.vllm_connector.worker.partial_forward import Run, split
from kvshare.vllm_connector.worker.ranks import as_one, on_all_ranks
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.start import Attached
from kvshare.vllm_connector.worker.step_budget import num_admitted
from kvshare.vllm_connector.worker.times import PASS
from kvshare.vllm_connector.worker.transfers import PendingLoad

log = logging.getLogger("vllm.kvshare")


@dataclass(eq=False)
class ArrivedLoad:
    """
    A load whose copies are written. Its first pass may take several steps: `left` is what is not computed
    yet, None before the first one.
    """

    load: PendingLoad
    choosing: Choosing | None = None  # if the request has a repair order
    left: list[Run] | None = None

    @property
    def request_id(self) -> str:
        return self.load.request.request_id

    @property
    def num_to_compute(self) -> int:
        """At most, with repairs that are not chosen yet."""
        if self.load.is_cancelled:
            return 0
        order = self.load.request.order
        num_ordered = 0 if order is None else order.num_tokens
        if self.left is not None:
            return num_ordered + sum(len(run.span) for run in self.left)
        num_probes = 0 if order is None else len(order.probes)
        return num_ordered + num_probes + sum(map(len, self.load.request.runs(self.load.unreadable)))

    def take_runs(self, max_tokens: int) -> list[Run]:
        """The next runs of its first pass."""
        parts = list(split(self.left or (), max_tokens))
        self.left = [run for part in parts[1:] for run in part]
        return parts[0] if parts else []


class Placeholders:
    """Used by vLLM's thread only. `can_listen`: whether attention can be watched, to choose repairs."""

    def __init__(
        self, attached: Attached, device: Device, reports: Reports, *, step_tokens: int, can_listen: bool
    ) -> None:
        self._cache, self._forward = attached.cache, attached.forward
        self._device = device
        self._reports = reports
        self._step_tokens = step_tokens
        self._can_listen = can_listen
        self._arrived: deque[ArrivedLoad] = deque()

    def add(self, loads: Iterable[PendingLoad]) -> None:
        """Their copies are written; they are computed in this step or a later one."""
        self._arrived.extend(map(ArrivedLoad, loads))

    def cancel(self, request_ids: Collection[str]) -> None:
        for arrived in self._arrived:
            arrived.load.cancel_if_in(request_ids)

    def fail_all(self) -> None:
        """What was written for them is lost."""
        for arrived in self._arrived:
            self._fail(arrived)
        self._arrived.clear()

    def compute_due(self) -> None:
        """Compute what fits this step, and report the loads that are complete."""
        if due := self._due():
            self._compute_and_report(due)

    def _due(self) -> list[ArrivedLoad]:
        """The loads to compute in this step: in the order of arrival, within the budget."""
        sizes = (arrived.num_to_compute for arrived in self._arrived)
        return [self._arrived.popleft() for _ in range(num_admitted(sizes, self._step_tokens))]

    def _compute_and_report(self, due: Sequence[ArrivedLoad]) -> None:
        """
        Compute the placeholders of the loads, unless they were cancelled, and report them.

        Of a load that is larger than the budget, which is the only one to compute then, a part is computed
        and the rest in later steps.
        """
        began = self._device.mark()
        awaited = [arrived for arrived in due if not arrived.load.is_cancelled]
        try:
            self._prepare([arrived for arrived in awaited if arrived.left is None])
            with as_one("a pass over placeholders"):
                choices, num_run = self._compute(awaited)
        except Exception as exc:  # noqa: BLE001  logged, without its message
            log.error("kvshare: computing for %d requests failed: %s", len(awaited), classes_and_places(exc))
            for arrived in due:
                self._fail(arrived)
            return
        if num_run:
            self._reports.times.add(PASS, began, self._device.mark(), num_run)
        for arrived in due:
            if arrived.left and not arrived.load.is_cancelled:
                self._arrived.appendleft(arrived)
                continue
            choice = choices.get(arrived.request_id)
            result = LoadResult(False, arrived.load.unreadable, choice.repairs if choice is not None else ())
            self._reports.note_load(arrived.request_id, result)

    def _fail(self, arrived: ArrivedLoad) -> None:
        self._reports.note_load(arrived.request_id, arrived.load.failure())

    def _prepare(self, new: Sequence[ArrivedLoad]) -> None:
        """Decide what the first pass of loads computes. Those with a repair order listen to it."""

        def prepare() -> None:
            for arrived in new:
                load = arrived.load
                if (order := load.request.order) is not None:
                    arrived.choosing = Choosing(
                        load.request, order, load.unreadable, self._cache, can_listen=self._can_listen
                    )

        if any(arrived.load.request.order is not None for arrived in new):
            on_all_ranks(prepare, "another rank could not prepare a choice of repairs")
        for arrived in new:
            request, unreadable = arrived.load.request, arrived.load.unreadable
            arrived.left = (
                [Run(request.block_ids, span, request.token_ids) for span in request.runs(unreadable)]
                if arrived.choosing is None
                else arrived.choosing.first_pass
            )

    def _compute(self, awaited: Sequence[ArrivedLoad]) -> tuple[dict[str, RepairChoice], dict[str, int]]:
        """
        Compute placeholders; where that is done, choose repairs and compute them.

        Returns:  the choices by request, and how many tokens were computed of each request that has any
        """
        first = {arrived.request_id: arrived.take_runs(self._step_tokens) for arrived in awaited}
        self._run(first.values(), listens=any(a.choosing and a.choosing.listens for a in awaited))
        choosing = {
            arrived.request_id: arrived.choosing
            for arrived in awaited
            if arrived.choosing and not arrived.left
        }
        choices = {request_id: chooser.choice() for request_id, chooser in choosing.items()}
        second = {
            request_id: chooser.second_pass(choices[request_id]) for request_id, chooser in choosing.items()
        }
        self._run(second.values())
        num_run = Counter[str]()
        for request_id, runs in (*first.items(), *second.items()):
            num_run[request_id] += sum(len(run.span) for run in runs)
        return choices, +num_run  # without requests of which nothing was computed

    def _run(self, runs_by_request: Iterable[Sequence[Run]], *, listens: bool = False) -> None:
        together = [run for runs in runs_by_request for run in runs]
        if together and listens:
            self._forward.compute(together, watching=self._forward.listening)
        elif together:
            self._forward.compute(together)
