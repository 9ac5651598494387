"""
Computes what no copy covers: the placeholders of loads whose copies are written, within the step's budget.

vLLM's own token budget does not count this, so a step takes only as many loads as fit; the others wait, in
the order of their arrival. If a load has a repair order, repairs are chosen and computed, too:

    arrived --> first pass --> its results are read --> second pass --> reported
                         '---- nothing to choose (any more) ---------------^

Loads that join a step are completed in it: vLLM computes their requests' tails next. If a pass with them
fails, their whole prompts are computed. vLLM cannot take them back, so a second failure is raised in vLLM.

The passes of all loads in a step are made as one. While results are on their way from a GPU, other loads are
computed; when they have arrived on every rank, the second pass comes first. On a CPU results arrive at once,
and both passes are in the same step.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from delta_tree import Span
from kvshare.safe_logging import classes_and_places
from kvshare.vllm_connector.metadata import LoadResult
from kvshare.vllm_connector.worker.choosing import Choosing
from kvshare.vllm_connector.worker.device import Device, Reading
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.ranks import Agreement, as_one
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.runs import Run, runs_of, split
from kvshare.vllm_connector.worker.start import Attached
from kvshare.vllm_connector.worker.step_budget import num_admitted
from kvshare.vllm_connector.worker.under_way import PendingLoad

log = logging.getLogger("vllm.kvshare")


@dataclass(eq=False)
class ArrivedLoad:
    """
    A load whose copies are written. Its passes may take several steps: `left` is what remains of the pass
    under way; None before the first pass.
    """

    load: PendingLoad
    choosing: Choosing | None = None  # if the request has a repair order
    left: list[Run] | None = None

    @property
    def request_id(self) -> str:
        return self.load.request.request_id

    @property
    def due_choosing(self) -> Choosing | None:
        """Return `choosing` if its first pass is complete and no repairs are chosen yet, else None."""
        is_due = self.choosing is not None and self.choosing.choice is None and self.left == []
        return self.choosing if is_due else None

    @property
    def _first_spans(self) -> Sequence[Span]:
        if self.choosing is not None:
            return self.choosing.first_spans
        return self.load.request.passed(self.load.unreadable)

    def num_to_compute(self, *, reads_at_once: bool) -> int:
        """Return the most tokens in a step; `reads_at_once`: the second pass is in the same step."""
        if self.load.is_cancelled:
            return 0
        left = self._first_spans if self.left is None else [run.span for run in self.left]
        num_second = self.choosing.max_second if self.choosing is not None and reads_at_once else 0
        return sum(map(len, left)) + num_second

    def begin(self, cache: PagedCache, device: Device) -> None:
        request = self.load.request
        if self.choosing is not None:
            self.left = self.choosing.first_pass(cache, device)
        else:
            kept = request.head_rows(self.load.unreadable)
            self.left = runs_of(request, self._first_spans, kept=kept)

    def take_runs(self, max_tokens: int) -> list[Run]:
        """Take the next runs of its pass, of at most `max_tokens` tokens."""
        if not self.left or max_tokens <= 0:
            return []
        first, *others = split(self.left, max_tokens)
        self.left = [run for part in others for run in part]
        return first

    def result(self) -> LoadResult:
        choice = self.choosing.choice if self.choosing is not None else None
        repaired = () if choice is None or self.load.is_cancelled else choice.repairs
        load = self.load
        return LoadResult(load.has_failed, load.unreadable, repaired, load.late_s, frozenset(load.late))


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
        self._reading: dict[ArrivedLoad, Reading] = {}  # loads between their passes, alike on every rank
        self._have_read = Agreement[ArrivedLoad]()

    @property
    def is_idle(self) -> bool:
        """Return whether nothing waits to be computed."""
        return not self._arrived and not self._reading

    def add(self, loads: Iterable[PendingLoad]) -> None:
        """Add loads whose copies are written. They are computed now or later, unless they were early."""
        for load in loads:
            arrived, order = ArrivedLoad(load), load.request.order
            if load.request.lacks_media(load.unreadable):
                log.warning(
                    "kvshare: KV of a medium was lost, vLLM computes the prompt; nothing is to be done"
                )
                self._fail(arrived)
                continue
            if load.early is not None:
                if load.early.has_failed or load.unreadable:  # the pass has read wrong rows
                    self._fail(arrived)
                    continue
                self._reports.note_early(load)
                arrived.left, arrived.choosing = [], load.early.choosing
            try:
                if order is not None and arrived.choosing is None:
                    arrived.choosing = Choosing(
                        load.request,
                        order,
                        load.unreadable,
                        can_listen=self._can_listen,
                        may_stop=self._forward.may_stop,
                    )
            except Exception as exc:  # noqa: BLE001  logged, without its message
                log.error("kvshare: preparing a choice failed: %s", classes_and_places(exc))
                self._fail(arrived)
                continue
            self._arrived.append(arrived)

    def cancel(self, request_ids: Collection[str]) -> None:
        for arrived in (*self._arrived, *self._reading):
            arrived.load.cancel_if_in(request_ids)

    def fail_all(self) -> None:
        """Report all loads as failed: their blocks or their segments are lost."""
        for arrived in (*self._arrived, *self._reading):
            self._fail(arrived)
        self._arrived.clear()
        self._reading.clear()

    def wait_for_results(self, timeout_s: float) -> bool:
        """Wait for the results of a first pass, if any are on their way. Returns whether some are."""
        if not self._reading:
            return False
        if not any(arrived.load.is_cancelled for arrived in self._reading):
            next(iter(self._reading.values())).wait(timeout_s)
        return True

    def say(self) -> None:
        """Send the other ranks which results have arrived here. `compute_due` must follow in this step."""
        self._have_read.say({arrived: reading.is_done for arrived, reading in self._reading.items()})

    def compute_due(self, joined: Sequence[PendingLoad] = ()) -> set[int]:
        """
        Compute the loads that join this step and others that fit, and report those that are complete.

        Returns:  the blocks of the others: vLLM may free them before the device has computed them. Blocks of
                  joining loads are not freed before this step has ended
        """
        self._choose_read()
        joining = [ArrivedLoad(load) for load in joined]
        num_joining = sum(arrived.num_to_compute(reads_at_once=True) for arrived in joining)
        due = self._due(num_joining)
        if due or joining:
            self._compute_and_report(due, joining)
        return {block_id for arrived in due for block_id in arrived.load.request.block_ids}

    def _choose_read(self) -> None:
        """Make the choices whose results have arrived on every rank; their second passes come first."""
        if not self._reading:
            return
        have_read = self._have_read.known()
        ready = [arrived for arrived in self._reading if arrived in have_read or arrived.load.is_cancelled]
        for arrived in reversed(ready):
            reading, choosing = self._reading.pop(arrived), arrived.choosing
            try:
                if choosing is not None and not arrived.load.is_cancelled:
                    with as_one("a choice of repairs"):
                        arrived.left = choosing.second_pass(reading)
            except Exception as exc:  # noqa: BLE001  logged, without its message
                log.error("kvshare: choosing repairs failed: %s", classes_and_places(exc))
                self._fail(arrived)
                continue
            self._arrived.appendleft(arrived)

    def _due(self, num_joining: int) -> list[ArrivedLoad]:
        """Take the loads to compute in this step: in the order of arrival, within the rest of the budget."""
        at_once = self._device.reads_at_once
        sizes = (arrived.num_to_compute(reads_at_once=at_once) for arrived in self._arrived)
        number = num_admitted(sizes, self._step_tokens, num_tokens=num_joining)
        return [self._arrived.popleft() for _ in range(number)]

    def _compute_and_report(self, due: Sequence[ArrivedLoad], joining: Sequence[ArrivedLoad]) -> None:
        """
        Compute the next pass of the loads, unless they were cancelled, and report those that are complete.

        If a load is larger than the budget, it is the only one in `due`, and only a part of it is computed.
        """
        began = self._device.mark()
        awaited = [arrived for arrived in due if not arrived.load.is_cancelled]
        heard = [arrived.choosing for arrived in due if arrived.choosing and arrived.choosing.listens]
        is_whole = not any(choosing.is_brief for choosing in heard)
        try:
            with as_one("a pass over placeholders"):
                num_run = self._compute(awaited, joining)
        except Exception as exc:  # noqa: BLE001  logged, without its message
            num_failed = len(awaited) + len(joining)
            log.error("kvshare: computing for %d requests failed: %s", num_failed, classes_and_places(exc))
            for arrived in due:
                self._reading.pop(arrived, None)
                self._fail(arrived)
            for arrived in joining:
                self._compute_whole(arrived)
            return
        if num_run:
            ended = self._device.mark()
            self._reports.note_pass(began, ended, num_run, is_plain=not heard, is_whole=is_whole)
        for arrived in joining:
            self._reports.note_joined(arrived.request_id, arrived.result())
        for arrived in reversed(due):
            if arrived.left and not arrived.load.is_cancelled:
                self._arrived.appendleft(arrived)
            elif arrived not in self._reading:
                self._reports.note_load(arrived.request_id, arrived.result())

    def _compute_whole(self, arrived: ArrivedLoad) -> None:
        """Compute the whole prompt of a load that joins this step, as vLLM reads all of its rows next."""
        request = arrived.load.request
        self._forward.compute(runs_of(request, request.runs(frozenset(arrived.load.wanted))))
        self._reports.note_joined(arrived.request_id, replace(arrived.result(), failed=True))

    def _fail(self, arrived: ArrivedLoad) -> None:
        self._reports.note_load(arrived.request_id, arrived.load.failure())

    def _compute(self, awaited: Sequence[ArrivedLoad], joining: Sequence[ArrivedLoad] = ()) -> Counter[str]:
        """
        Compute the next pass of each load; loads that join this step completely. When a first pass is
        complete, read its results; if they arrive at once, choose repairs and compute them, too.

        Returns:  how many tokens were computed for each request, without zeros
        """
        for arrived in (*joining, *awaited):
            if arrived.left is None:
                arrived.begin(self._cache, self._device)
        num_joining = sum(arrived.num_to_compute(reads_at_once=True) for arrived in joining)
        num_run = self._pass([*joining, *awaited], max(self._step_tokens, num_joining))
        to_choose = {arrived: arrived.due_choosing for arrived in awaited}
        chosen = []
        for arrived, choosing in to_choose.items():
            if choosing is None:
                continue
            reading = choosing.end_first_pass()
            if self._device.reads_at_once:
                arrived.left = choosing.second_pass(reading)
                chosen.append(arrived)
            else:
                self._reading[arrived] = reading
        return num_run + self._pass(chosen, self._step_tokens - num_run.total())

    def _pass(self, loads: Iterable[ArrivedLoad], max_tokens: int) -> Counter[str]:
        """Compute the next runs of these loads together. Returns how many tokens were computed for each."""
        num_run, together = Counter[str](), list[Run]()
        for arrived in loads:
            runs = arrived.take_runs(max_tokens - num_run.total())
            num_run[arrived.request_id] = sum(len(run.span) for run in runs)
            together += runs
        if any(run.listener is not None for run in together):
            self._forward.compute(together, watching=self._forward.listening)
        elif together:
            self._forward.compute(together)
        return +num_run  # without requests of which nothing was computed
