"""
A connector of another kind: it keeps all full blocks of ended requests and finds them by vLLM's hashes.

As vLLM's offloading connectors do, which need a GPU: a save keeps the request's blocks after its end, and
what it has of a prompt is loaded in the step in which the prompt is scheduled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

Rows = list[torch.Tensor]


@dataclass
class Blocks(KVConnectorMetadata):
    """What the worker is to do in a step, as pairs of a block and its hash."""

    load: list[tuple[int, bytes]] = field(default_factory=list)
    save: dict[str, list[tuple[int, bytes]]] = field(default_factory=dict)  # by ended request


class BlockKeeper(KVConnectorBase_V1, SupportsHMA):
    """Both sides are in one process, so that what is kept is there for both."""

    kept: ClassVar[dict[bytes, Rows]] = {}
    num_loaded: ClassVar[int] = 0

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._block_size = vllm_config.cache_config.block_size
        self._next, self._saved = Blocks(), set[str]()
        self._caches: list[torch.Tensor] = []

    @classmethod
    def forget(cls) -> None:
        cls.kept, cls.num_loaded = {}, 0

    # --- worker side ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for block_id, key in self._step.load:
            for cache, rows in zip(self._caches, self.kept[key], strict=True):
                cache[block_id].copy_(rows)
            type(self).num_loaded += 1

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for request_id, blocks in self._step.save.items():
            for block_id, key in blocks:
                self.kept[key] = [cache[block_id].clone() for cache in self._caches]
            self._saved.add(request_id)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        saved, self._saved = self._saved, set()
        return KVConnectorTransferResults(finished_sending=saved)

    @property
    def _step(self) -> Blocks:
        return self._connector_metadata if isinstance(self._connector_metadata, Blocks) else Blocks()

    # --- scheduler side ---

    def get_num_new_matched_tokens(self, request: Request, num_computed: int) -> tuple[int, bool]:
        keys = self._keys(request)[num_computed // self._block_size :]
        found = next((place for place, key in enumerate(keys) if key not in self.kept), len(keys))
        least_left = request.num_tokens - 1 - num_computed
        return min(found, least_left // self._block_size) * self._block_size, False

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external: int) -> None:
        if num_external:
            (block_ids,) = blocks.get_block_ids()
            first = request.num_computed_tokens // self._block_size
            last = first + num_external // self._block_size
            pairs = zip(block_ids[first:last], self._keys(request)[first:last], strict=True)
            self._next.load.extend(pairs)

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        step, self._next = self._next, Blocks()
        return step

    def request_finished(self, request: Request, block_ids: Sequence[int]) -> tuple[bool, None]:
        num_full = min(request.num_computed_tokens, request.num_tokens - 1) // self._block_size
        pairs = list(zip(block_ids[:num_full], self._keys(request)[:num_full], strict=True))
        if pairs:
            self._next.save[request.request_id] = pairs
        return bool(pairs), None

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    def _keys(self, request: Request) -> list[bytes]:
        return [bytes(each) for each in request.block_hashes]
