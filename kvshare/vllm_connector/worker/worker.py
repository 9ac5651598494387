"""
The connector inside a worker, in the order in which vLLM calls it.

    attach_model    once, before the first step: memory and self-test                  start.py
    begin           before vLLM's forward pass of a step: start loads, drop segments;  transfers.py
                    wait for loads that join the step, and compute them                placeholders.py
    advance         after it: take loads whose copies are written                      transfers.py
                    and compute what no copy covers                                    placeholders.py
    save            after it: start saves                                              transfers.py
    take_transfers, build_connector_worker_meta
                    after it: what has ended since the last step                       reports.py
    forget_segments, release_caches, restore_caches
                    between steps: other weights; around a sleep of vLLM               transfers.py

A step waits for the copies of loads that join it, and for the save of a request that it preempts. Without a
forward pass it also waits, at most 5 ms, for results of a pass over placeholders, or else for loads; a load
that is alone may be computed while it arrives (`early_passes.py`). A request is scheduled when its load is
reported. If the load fails, vLLM computes the prompt; if the load joins a step, the worker computes it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvshare.vllm_connector.config import ConnectorSettings
from kvshare.vllm_connector.metadata import StepMetadata, WorkerHandshake, WorkerReport
from kvshare.vllm_connector.speculation import drafts_after_report, drafts_by_head
from kvshare.vllm_connector.worker.device import Device, device_of_this_worker
from kvshare.vllm_connector.worker.disk_start import with_disk
from kvshare.vllm_connector.worker.early_passes import EarlyPasses
from kvshare.vllm_connector.worker.head_passes import HeadPasses
from kvshare.vllm_connector.worker.host_memory import PagesRefusedError
from kvshare.vllm_connector.worker.models import Models
from kvshare.vllm_connector.worker.placeholders import Placeholders
from kvshare.vllm_connector.worker.ranks import agreed, num_ranks
from kvshare.vllm_connector.worker.reports import Reports
from kvshare.vllm_connector.worker.start import Attached, WorkerStart
from kvshare.vllm_connector.worker.transfers import MAX_WAIT_S, Transfers
from kvshare.vllm_connector.worker.under_way import PendingLoad

log = logging.getLogger("vllm.kvshare")


class WorkerParts(NamedTuple):
    """The parts of a worker once a model is attached."""

    transfers: Transfers
    placeholders: Placeholders
    early: EarlyPasses
    heads: HeadPasses


class ConnectorWorker:
    """One per worker process. All methods run on vLLM's thread."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        settings: ConnectorSettings,
        spec: KVCacheSpec,
        layer_names: Sequence[str],
        device: Device | None = None,
    ) -> None:
        device = device or device_of_this_worker()
        self._start = WorkerStart(vllm_config, settings, spec, tuple(layer_names), device)
        self._reports = Reports(self._start.device)
        self._attached: Attached | None = None
        self._parts: WorkerParts | None = None  # None until the self-test has run: then no load can come
        self._has_head = False  # a head drafts, from the target's hidden states
        self.handshake: WorkerHandshake | None = None  # None until a model is attached

    @property
    def attached(self) -> Attached:
        assert self._attached is not None, "a model is attached"
        return self._attached

    @property
    def parts(self) -> WorkerParts:
        assert self._parts is not None, "a model is attached"
        return self._parts

    def attach_model(self, models: Models) -> None:
        """Take the model and run the self-test. Failures are reported in the handshake, not raised."""
        try:
            # Stays even if the test fails: CUDA knows its memory.
            self._has_head = models.draft is not None and drafts_by_head(self._start.config)
            self._attached = self._start.attach(models)
            handshake = self._start.verify(models, self._attached)
            self._attached, self.handshake = with_disk(self._attached, handshake, self._start)
            self.use(self._attached, can_listen=self.handshake.can_listen)
        except PagesRefusedError as exc:
            self._attached = None  # the pages that it was given are missed elsewhere
            log.error("kvshare: %s", exc)
            self.handshake = WorkerHandshake(unsupported=(str(exc),))
        except Exception as exc:
            log.exception("kvshare: the self-test raised an error")  # with its message: no prompt exists yet
            reason = f"the self-test raised an error: {type(exc).__name__}: {exc}"
            self.handshake = WorkerHandshake(unsupported=(reason,))

    def use(self, attached: Attached, *, can_listen: bool) -> None:
        """Copy and compute with these parts of vLLM from now on."""
        device, step_tokens = self._start.device, self._start.step_tokens
        self._attached = attached
        self._parts = WorkerParts(
            Transfers(attached, device, self._reports, drafts_late=drafts_after_report(self._start.config)),
            Placeholders(attached, device, self._reports, step_tokens=step_tokens, can_listen=can_listen),
            EarlyPasses(attached, device, self._reports, step_tokens=step_tokens, can_listen=can_listen),
            HeadPasses(attached.forward, device, self._reports, step_tokens=step_tokens),
        )

    def begin(self, step: StepMetadata) -> None:
        """Before the forward pass of a step: start loads, drop segments, compute joining loads."""
        if self._parts is None:
            assert not step.loads, "no ticket is taken before all workers have parts"
            return
        transfers, placeholders, *_ = self._parts
        cancelled = frozenset(step.cancelled)
        transfers.cancel(cancelled)
        placeholders.cancel(cancelled)
        transfers.wait_for_saves(step.preempted)  # before loads, which may get their blocks
        loads = [replace(load, has_head=self._has_head) for load in step.loads]
        for request in loads:
            if not request.reads_within_s:
                transfers.begin_load(request, joins=request.request_id in step.joining)
        transfers.drop(step.drops, evicted=step.evictions)
        for request in loads:
            if request.reads_within_s:  # reads from disk need the memory of dropped segments
                transfers.begin_load(request, joins=False)
        self.attached.store.preload(step.preloads)
        self.attached.store.write(step.writes)
        if step.joining or (step.has_forward and num_ranks() > 1):
            self._say()
        if step.joining:
            self._advance(transfers.take_joined(step.joining))

    def advance(self, step: StepMetadata) -> None:
        """After the forward pass: report finished copies, and compute placeholders of loads."""
        if self._parts is None:
            return
        transfers, placeholders, _, heads = self._parts
        if placeholders.is_idle and (block_ids := heads.compute(transfers.waiting_for_disk)):
            transfers.fence(block_ids)
        if step.has_forward:
            self._reports.note_step(step.number)
        elif not (placeholders.wait_for_results(MAX_WAIT_S) or heads.wait(MAX_WAIT_S)):
            self._wait_for_loads()
        if not step.joining:  # otherwise this was done before the forward pass, together with joining loads
            if not step.has_forward or num_ranks() == 1:  # as late as possible: a CPU's pass ends only now
                self._say()
            self._advance()
        transfers.announce(step.arriving)
        self._reports.note_disk(self.attached.store.take_disk_report())

    def _wait_for_loads(self) -> None:
        """Wait for loads, for a short time. A single load may be computed before it has arrived."""
        transfers, placeholders, early, _ = self.parts
        only_load = transfers.only_load if placeholders.is_idle else None
        if (
            only_load is None
            or not isinstance(load := only_load.transfer, PendingLoad)
            or not early.may_begin(load)
        ):
            transfers.wait_for_loads()
            return
        assert load.work is not None
        load.work.rush()
        is_due = transfers.wait_until_due(only_load, partial(early.is_due, load, only_load.job))
        if all(agreed([is_due])):
            early.begin(load)
            transfers.fence(load.request.block_ids)

    def _advance(self, joined: Sequence[PendingLoad] = ()) -> None:
        """Compute what is due of the loads that have arrived, together with those that join the step."""
        transfers, placeholders, *_ = self.parts
        placeholders.add(transfers.take_arrived())
        block_ids = placeholders.compute_due(joined)
        # Copies from these may be under way still, and the scheduler unpins them with this step's report.
        block_ids.update(*(load.read_blocks for load in joined if load.is_from_blocks))
        if block_ids:
            transfers.fence(block_ids)

    def save(self, step: StepMetadata) -> None:
        """Begin saves, after the forward pass that has written their rows."""
        if self._parts is not None:
            for request in step.saves:
                self._parts.transfers.begin_save(request)

    def _say(self) -> None:
        """Send the other ranks what is finished here, once in a step."""
        self.parts.transfers.say()
        self.parts.placeholders.say()

    def take_transfers(self) -> KVConnectorTransferResults:
        """Return the requests whose saves and loads ended or failed since the last call."""
        return self._reports.take_transfers()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        """Return the report of everything since the last call, or None."""
        return self._reports.take_report()

    def forget_segments(self) -> None:
        """The weights have changed: drop all segments, fail loads under way, and tell the scheduler."""
        self._reports.note_new_weights()
        if self._parts is not None:
            self._parts.transfers.forget_segments()
            self._parts.placeholders.fail_all()

    def release_caches(self) -> None:
        """
        Call this before vLLM releases the memory of its KV cache. Waits for copies under way.

        Saves under way are completed. Loads fail, because the cache loses what they wrote. Idempotent.
        """
        if self._parts is not None:
            self._parts.transfers.fall_asleep()
            self._parts.placeholders.fail_all()

    def restore_caches(self) -> None:
        """Call this when the KV cache has memory again, perhaps as other tensors. May be called again."""
        if self._parts is not None:
            self._parts.transfers.wake_up()

    def close(self) -> None:
        """Stop. Waits for copies under way, because their memory is about to be freed."""
        if self._parts is not None:
            self._parts.transfers.close()
