"""
Start of a worker: it takes vLLM's model and KV cache, allocates memory for segments, and tests itself.

    attach    [ caches, memory for segments without its pages ]
    verify    [ self-test: the model ....... ][ copies ]
              [ pages, registration ]                       a thread, `host_memory.py`

All ranks do it together, before the first step. Steps work with the parts in `Attached`; the handshake says
what of them can be used.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheSpec

from kvshare.kv.layout import KVLayout
from kvshare.kv.movement import why_not_movable
from kvshare.kv.parameters import model_fingerprint
from kvshare.vllm_connector.config import ConnectorSettings
from kvshare.vllm_connector.metadata import WorkerHandshake
from kvshare.vllm_connector.speculation import drafts_by_head
from kvshare.vllm_connector.worker.block_copy_test import BlockCopyTest
from kvshare.vllm_connector.worker.checks import first_problem, tried
from kvshare.vllm_connector.worker.copy_test import CopyTest
from kvshare.vllm_connector.worker.device import Device, name_of_this_device
from kvshare.vllm_connector.worker.draft_test import DraftTest
from kvshare.vllm_connector.worker.host_memory import Taken, taken
from kvshare.vllm_connector.worker.mixed_cache import paged_cache
from kvshare.vllm_connector.worker.model import loaded_parameters, weights_digest
from kvshare.vllm_connector.worker.models import Models
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.partial_forward import PartialForward
from kvshare.vllm_connector.worker.ranks import (
    agreed,
    as_one,
    check_host_memory,
    num_ranks,
    on_all_ranks,
    rank,
    shared_memory,
)
from kvshare.vllm_connector.worker.segment_store import SegmentStore, arena_bytes
from kvshare.vllm_connector.worker.self_test import SelfTest

log = logging.getLogger("vllm.kvshare")

_ELSEWHERE = "the self-test failed on another rank"


@dataclass(frozen=True, slots=True, eq=False)
class Attached:
    """The parts with which a worker copies and computes. The self-test completes the layout in `cache`."""

    cache: PagedCache
    forward: PartialForward
    store: SegmentStore


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of the self-test: reasons why nothing can be shared, and warnings about limits."""

    unsupported: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    can_listen: bool = False  # attention can be watched
    can_copy_blocks: bool = False  # copies inside vLLM's cache give the right rows
    unverified: str = ""  # why the rows of what drafts are not known to be right


@dataclass(frozen=True, slots=True, eq=False)
class WorkerStart:
    """The data that vLLM gives a worker before the model."""

    config: VllmConfig
    settings: ConnectorSettings
    spec: KVCacheSpec
    layer_names: Sequence[str]
    device: Device

    @property
    def step_tokens(self) -> int:
        """Return the most tokens that loads may compute in one step."""
        return self.settings.step_tokens or int(self.config.scheduler_config.max_num_batched_tokens)

    def attach(self, models: Models) -> Attached:
        """
        Take the models and allocate memory, whose pages `verify` reserves.

        Raises:  MemoryError if the host has too little, and any error of an unexpected model
        """
        cache, forward = on_all_ranks(
            partial(self._read_models, models), "another rank could not be prepared"
        )
        return Attached(cache, forward, self._allocate(cache.kv_layout, has_draft=models.draft is not None))

    def verify(self, models: Models, attached: Attached) -> WorkerHandshake:
        """Run the self-test, which overwrites blocks, and take the memory for segments meanwhile."""
        findings = self._findings(models, attached)
        cache = attached.cache
        layout = cache.kv_layout
        keys = layout.planes[0]
        return WorkerHandshake(
            unsupported=findings.unsupported,
            warnings=findings.warnings,
            unverified=findings.unverified,
            can_move_keys=layout.can_move,
            can_listen=findings.can_listen,
            can_copy_blocks=findings.can_copy_blocks,
            rope=layout.digest,
            num_layers=layout.num_layers,
            num_kv_heads=keys.num_heads,
            head_dim=keys.dim,
            kv_planes=str(layout) if len(cache.parts) > 1 else "",
            dtype=str(layout.dtype).removeprefix("torch."),
            attention_backend=f"{attached.forward.backend_name}/{cache.layout}",
            bytes_per_token=layout.bytes_per_token,
            weights="-".join(map(weights_digest, models.each)),
            fingerprint=model_fingerprint(
                loaded_parameters(models.target),
                num_layers=models.num_target_layers(attached.cache.layers),
                head_dim=keys.dim,
            ),
            device=name_of_this_device(),
        )

    def _findings(self, models: Models, attached: Attached) -> Findings:
        """Run the self-test and take the memory, and log how long both took."""
        buffer = attached.store.arena.buffer
        with taken(buffer, self.device) as memory:
            if num_ranks() > 1:
                # While CUDA registers memory it may let kernels wait, and a pass waits for all ranks.
                on_all_ranks(memory.result, "another rank could not take its memory")
            began = time.perf_counter()
            with as_one("the self-test"):
                findings = self._run_self_test(models, attached, memory.result)
            ended, took = time.perf_counter(), memory.result()
        log.info(
            "kvshare: the self-test took %.1f s; %.1f GiB of host memory for KV were reserved in %.1f s and "
            "registered in %.1f s",
            ended - began,
            buffer.nbytes / 2**30,
            took.reserve_s,
            took.register_s,
        )
        return findings

    def _read_models(self, models: Models) -> tuple[PagedCache, PartialForward]:
        layers = self.config.compilation_config.static_forward_context
        cache = paged_cache(
            models.in_order({name: layers[name] for name in self.layer_names}),
            block_size=self.spec.block_size,
            dtype=self.config.model_config.dtype,
        )
        return cache, PartialForward(models, cache, self.config, self.spec)

    def _allocate(self, layout: KVLayout, *, has_draft: bool = False) -> SegmentStore:
        """
        Make the store, with an arena that ranks share if they can. All ranks call it together.

        Pages of a rank's own arena are not reserved yet. Those of a shared one are, but still to be emptied.
        """
        keys, *others = layout.planes
        transfer, max_bytes = self.config.kv_transfer_config, self.settings.max_bytes
        assert transfer is not None, "or there would be no connector"
        num_heads, first_head, is_mixed = None, 0, len(others) > 1 or has_draft
        check_host_memory(arena_bytes(max_bytes))
        # Layers that differ in KV heads are divided among the ranks in different ways.
        buffer = None if is_mixed else shared_memory(arena_bytes(max_bytes), str(transfer.engine_id))
        if buffer is not None:
            num_heads = self.config.model_config.get_total_num_kv_heads()
            copies = max(1, keys.num_heads * num_ranks() // num_heads)  # more ranks than heads: replicated
            first_head = rank() // copies * keys.num_heads

        def place() -> SegmentStore:
            own_bytes = arena_bytes(max_bytes // num_ranks())  # for this rank's heads only
            arena = buffer if buffer is not None else torch.empty(own_bytes, dtype=torch.uint8)
            return SegmentStore(arena, layout, num_heads=num_heads, first_head=first_head)

        return on_all_ranks(place, "another rank could not take its memory")

    def _run_self_test(
        self, models: Models, attached: Attached, wait_for_memory: Callable[[], Taken]
    ) -> Findings:
        cache, model_config = attached.cache, self.config.model_config
        self_test = SelfTest(
            cache,
            attached.forward,
            vocab_size=model_config.get_vocab_size(),
            max_model_len=model_config.max_model_len,
        )
        for check in (self_test.check_layout, self_test.check_partial_attention, self_test.check_scales):
            problem = check()
            if not all(agreed([problem is None])):  # the next check needs all ranks
                return Findings(unsupported=(problem or _ELSEWHERE,))
        if unverified := self._check_drafts(self_test, models, attached):
            return Findings(unverified=unverified)
        problem = self_test.check_listening()
        can_listen = all(agreed([problem is None]))
        warnings = () if can_listen else (f"repairs are chosen by position only: {problem}",)
        tables, unsupported = models.frequency_tables()
        verifications = self_test.movements(tables)
        if not all(agreed([not why_not_movable(verifications)])):  # all ranks compute, or none
            verifications = self_test.movements_despite_rounding(tables, verifications)
        cache.set_movements([(k.movement, v.movement) for k, v in verifications])
        if not all(agreed([cache.kv_layout.can_move])):
            problem = why_not_movable(verifications) or _ELSEWHERE
            limit = f"only text at the same position is shared: {problem if tables else unsupported}"
            warnings = (*warnings, limit)
        # The last check that computes: before it passes have no rows but their own.
        warnings = (*warnings, *self._check_graphs(self_test, attached.forward))
        if can_listen:
            warnings = (*warnings, *self._check_stopping(self_test, attached.forward))
        wait_for_memory()
        slower, problem = self._check_copies(attached, self_test.block_ids)
        if problem is not None:
            return Findings(unsupported=(problem,))
        problem = first_problem(
            [BlockCopyTest(part, self.device, block_ids=self_test.block_ids) for part in cache.parts]
        )
        can_copy_blocks = all(agreed([problem is None]))
        if not can_copy_blocks:
            slower = (*slower, f"nothing is copied inside vLLM's KV cache: {problem or _ELSEWHERE}")
        return Findings((), (*warnings, *slower), can_listen, can_copy_blocks)

    def _check_drafts(self, self_test: SelfTest, models: Models, attached: Attached) -> str:
        """Return why the rows of what drafts are not known to be right; empty if they are."""
        if models.draft is None:
            return ""
        assert models.prefill is not None
        test = DraftTest(
            attached.cache,
            attached.forward,
            models.prefill,
            tokens=self_test.tokens,
            block_ids=self_test.block_ids,
            num_target_layers=models.num_target_layers(attached.cache.layers),
            is_head=drafts_by_head(self.config),
            tolerance=self_test.tolerance,
        )
        problem = tried(test.check, "a prompt that vLLM's model runner computes")
        return "" if all(agreed([problem is None])) else problem or _ELSEWHERE

    def _check_graphs(self, self_test: SelfTest, forward: PartialForward) -> tuple[str, ...]:
        """Find out whether passes may be CUDA graphs, on all ranks. Returns warnings."""
        if not forward.has_graphs:
            return ()
        problem = tried(self_test.check_graphs, "a pass by CUDA graphs")
        forward.uses_graphs = all(agreed([problem is None]))
        if not forward.uses_graphs:
            return (f"passes are launched without CUDA graphs, which takes longer: {problem or _ELSEWHERE}",)
        log.info("kvshare: small passes over placeholders are launched as vLLM's CUDA graphs")
        return ()

    def _check_stopping(self, self_test: SelfTest, forward: PartialForward) -> tuple[str, ...]:
        """
        Find out whether passes may end after some of the layers, on all ranks. Returns warnings.

        Without graphs a GPU would have nothing to do while the pass after it is launched.
        """
        if forward.has_draft or not (forward.uses_graphs or self.device.reads_at_once):
            return ()
        problem = tried(self_test.check_stopping, "a pass over some of the layers")
        forward.may_stop = all(agreed([problem is None]))
        if forward.may_stop:
            return ()
        return (f"choosing repairs takes longer, as a pass cannot end early: {problem or _ELSEWHERE}",)

    def _check_copies(self, attached: Attached, block_ids: Sequence[int]) -> tuple[Sequence[str], str | None]:
        """Return warnings, and why nothing can be copied, or None. All ranks copy in the same way."""
        tests = [
            CopyTest(part, attached.store, self.device, block_ids=block_ids, part=number)
            for number, part in enumerate(attached.cache.parts)
        ]
        problem, warnings = first_problem(tests), list[str]()
        if not all(agreed([problem is None])) and self.device.simplify():
            warnings = [f"copies take more launches, without kernels of our own: {problem or _ELSEWHERE}"]
            problem = first_problem(tests)
        if all(agreed([problem is None])):
            return warnings, None
        return (), problem or _ELSEWHERE
