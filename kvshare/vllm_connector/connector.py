"""
`KVShareConnector`: vLLM's connector interface on one side, our scheduler and worker side on the other.

vLLM creates one in the scheduler and one in every worker, and calls

    in a worker
      attach_model                         once, through our worker class, before the first request
      get_handshake_metadata               once after that; vLLM 0.33 also after each sleep
      bind_connector_metadata              in every step, first; loads that join the step are completed in it
      start_load_kv                        in every step, after the forward pass, or before it if a request is
                                           scheduled in the step in which its load begins
      wait_for_layer_load, save_kv_layer   in every layer of a forward pass; they do nothing
      wait_for_save                        in every step, after start_load_kv
      get_transfer_results                 in every step, then
      build_connector_worker_meta          in every step, last
      forget_segments                      when weights change, through our worker class
      supports_sleep_mode                  once, in vLLM 0.33
      unregister_kv_caches                 before each sleep
      restore_kv_caches                    after each sleep
    in the scheduler
      bind_gpu_block_pool                  once, when its pool of blocks is there
      has_pending_block_frees              whenever a running request would be preempted
      has_pending_push_work                when there are no requests: whether steps go on, to save segments
      set_xfer_handshake_metadata_pp_aware once, with what all workers report; vLLM 0.33 also after each sleep
      requires_kv_delivery                 once
      on_new_request                       once for each request
      get_num_new_matched_tokens           in every step in which a request waits for blocks
      update_state_after_alloc             when a request gets blocks, and again when its KV is loaded
      build_connector_meta                 in every step, when requests are scheduled
      update_connector_output              in every step, with the reports of the workers
      request_finished, request_finished_all_groups
                                           one of them once for each request
      reset_cache                          when weights change, among other reasons
    in both
      shutdown                             once

Where the configuration is not supported, or the self-test fails, the connector does nothing, and the log, the
proxy and `kvshare doctor` say why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from kvshare.safe_logging import classes_and_places
from kvshare.vllm_connector.config import ConnectorSettings, unsupported_reasons
from kvshare.vllm_connector.metadata import StepMetadata, WorkerHandshake, WorkerReport
from kvshare.vllm_connector.scheduler.lifecycle import SchedulerSide
from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler
from kvshare.vllm_connector.speculation import why_unshared
from kvshare.vllm_connector.worker.models import Models
from kvshare.vllm_connector.worker.worker import ConnectorWorker

if TYPE_CHECKING:
    from vllm.config.kv_transfer import KVTransferConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("vllm.kvshare")

_INSIDE_ANOTHER = (
    "KVShare inside vLLM's own MultiConnector is not supported: take KVShareMultiConnector, as `kvshare vllm "
    "--beside` does"
)


class KVShareConnector(KVConnectorBase_V1, SupportsHMA):
    """
    Method names and contracts are vLLM's. After the start, an error of ours leaves a request unshared.

    It is raised into vLLM only where vLLM already expects KV that we can no longer provide.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        """Raises ValueError for invalid settings."""
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.from_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        problems = [*unsupported_reasons(vllm_config, kv_cache_config), *settings.unsupported_beside()]
        self._is_alone = settings.beside is None
        self._problems = tuple(problems)  # the scheduler side may see another configuration of the KV cache
        self._scheduler_side: SchedulerSide | None = None
        self._worker: ConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler_side = SchedulerSide(vllm_config, settings, problems)
        elif not problems and why_unshared(vllm_config) is None:
            group = kv_cache_config.kv_cache_groups[0]
            self._worker = ConnectorWorker(vllm_config, settings, group.kv_cache_spec, group.layer_names)

    # --- worker side ------------------------------------------------------------------------------------

    def attach_model(self, models: Models) -> None:
        """Called once by our worker class, before the first request."""
        if self._worker is not None:
            self._worker.attach_model(models)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        if self._is_alone and has_kv_transfer_group() and get_kv_transfer_group() is not self:
            return WorkerHandshake(unsupported=(_INSIDE_ANOTHER,))
        if self._worker is None:
            return WorkerHandshake(unsupported=self._problems)
        return self._worker.handshake

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """vLLM calls this at the beginning of each step, with or without a forward pass."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.begin(self._step_metadata())

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        if self._worker is not None:
            self._worker.advance(self._step_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: before vLLM's forward pass the KV of its requests is loaded."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Prompts are saved after their last layer, see `wait_for_save`."""

    def wait_for_save(self) -> None:
        if self._worker is not None:
            self._worker.save(self._step_metadata())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._worker.take_transfers() if self._worker is not None else KVConnectorTransferResults()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._worker.build_connector_worker_meta() if self._worker is not None else None

    def forget_segments(self) -> None:
        """Called by our worker class. The scheduler side notices when a load needs one of them."""
        if self._worker is not None:
            self._worker.forget_segments()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """vLLM 0.33 asks. It calls the next two around a sleep; for 0.32 our worker class does."""
        return True

    def unregister_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.release_caches()

    def restore_kv_caches(self) -> None:
        if self._worker is not None:
            self._worker.restore_caches()

    def _step_metadata(self) -> StepMetadata:
        metadata = self._connector_metadata
        return metadata if isinstance(metadata, StepMetadata) else StepMetadata()

    # --- scheduler side ---------------------------------------------------------------------------------

    @property
    def _scheduler(self) -> ConnectorScheduler:
        """Return the scheduler's part, for methods that vLLM calls in the scheduler only."""
        assert self._scheduler_side is not None
        return self._scheduler_side.scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        if len(self._kv_cache_config.kv_cache_groups) == 1:  # or nothing is shared
            spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
            self._scheduler.donors.bind(gpu_block_pool, block_size=spec.block_size)

    def has_pending_block_frees(self) -> bool:
        return self._scheduler.donors.would_free

    def has_pending_push_work(self) -> bool:
        return self._scheduler.unsaved.are_due or self._scheduler.disk.has_work

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """
        A connector that wraps ours passes on the metadata of its first child, which may not be ours.

        vLLM 0.33 calls this again after a sleep.
        """
        if self._scheduler_side is not None:
            self._scheduler_side.start_sharing(
                sent if isinstance(sent, WorkerHandshake) else WorkerHandshake(unsupported=(_INSIDE_ANOTHER,))
                for sent in metadata.values()
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """KV that is not saved only costs a later miss."""
        return False

    def on_new_request(self, request: Request) -> None:
        with _contained():
            self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_matched: int | None = 0
        is_asynchronous = False  # other requests run while it is loaded
        with _contained():
            num_matched, is_asynchronous = self._scheduler.get_num_new_matched_tokens(
                request, num_computed_tokens
            )
        return num_matched, is_asynchronous

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if self._scheduler.shares:  # a model that is not served with sharing may have no group of blocks
            self._scheduler.update_state_after_alloc(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        if not self._scheduler.shares:
            return StepMetadata()
        return self._scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """vLLM calls this before it reads which loads have arrived."""
        meta = connector_output.kv_connector_worker_meta
        report = meta if isinstance(meta, WorkerReport) else WorkerReport()
        keeping: frozenset[str] = frozenset()
        with _contained():
            keeping = self._scheduler.update_connector_output(report, connector_output.finished_sending or ())
        if keeping:  # these requests have ended, but copies are still written into their blocks
            connector_output.finished_recving = (connector_output.finished_recving or set()) - keeping

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        must_stay = False
        with _contained():
            must_stay = self._scheduler.request_finished(request, block_ids)
        return must_stay, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def reset_cache(self) -> bool | None:
        """vLLM calls this when weights change, among other reasons: all segments are dropped."""
        self._scheduler.reset_cache()
        return True

    # --- both sides -------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._scheduler_side is not None:
            self._scheduler_side.close()
        if self._worker is not None:
            self._worker.close()


@contextmanager
def _contained() -> Iterator[None]:
    """Log an error of ours instead of raising it: vLLM then serves the request unshared."""
    try:
        yield
    except Exception as exc:  # noqa: BLE001  logged, without its message
        log.error("kvshare: a request is served unshared: %s", classes_and_places(exc))
