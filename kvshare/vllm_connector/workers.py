"""
The worker class for `--worker-cls`: the platform's own worker, which also gives its model to the connector.

vLLM gives connectors everything but the model. `--worker-cls` is a documented option: nothing is patched.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, UniformTypeKVCacheSpecs

from kvshare.vllm_connector.beside import KVShareMultiConnector
from kvshare.vllm_connector.config import known_reasons
from kvshare.vllm_connector.connector import KVShareConnector
from kvshare.vllm_connector.speculation import draft_model_of, has_rows, why_unshared
from kvshare.vllm_connector.worker.device import RESERVED_BYTES
from kvshare.vllm_connector.worker.graph_passes import graph_passes
from kvshare.vllm_connector.worker.models import Models
from kvshare.vllm_connector.worker.runner_prefill import RunnerPrefill

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
elif current_platform.is_xpu():  # not supported by the connector; requests are served unshared
    from vllm.v1.worker.xpu_worker import XPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class KVShareWorker(PlatformWorker):
    """
    Gives the model to the connector when it is loaded and its caches are bound, before the first request.

    When weights change, segments of the old weights are forgotten, even without a call of `reset_connector`.
    A sleep of level 2 drops the weights, and others may be loaded after it.

    vLLM 0.32 does not tell connectors that it sleeps, 0.33 does; a second call changes nothing.
    """

    def determine_available_memory(self) -> int:
        """
        Leaves room for what the connector needs; vLLM would use all memory for its KV cache.

        Nothing, where it is known by now that nothing is shared.
        """
        available = int(super().determine_available_memory())
        config = self.vllm_config
        shares = not known_reasons(config) and why_unshared(config) is None
        takes_some = current_platform.is_cuda_alike() and shares
        return available - RESERVED_BYTES if takes_some else available

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> Any:
        """
        vLLM 0.32 asks for the spec of layers that use another one's KV (Gemma 4 E2B), where those of a group
        differ, and has none.
        """
        layers = self.vllm_config.compilation_config.static_forward_context
        return super().initialize_from_config(with_users_of_kv(kv_cache_config, layers))

    is_attached = False

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()
        _attach(self)
        return result

    def _maybe_activate_jit_monitor(self) -> None:
        """From then on vLLM takes kernels that are compiled for an accident; the self-test compiles ours."""
        _attach(self)
        super()._maybe_activate_jit_monitor()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().reload_weights(*args, **kwargs)
        finally:  # some may be others even where it failed
            _forget_segments()

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        try:
            super().update_weights(*args, **kwargs)
        finally:  # some may be others even where it failed
            _forget_segments()

    def finish_weight_update(self) -> None:
        try:
            super().finish_weight_update()
        finally:  # some may be others even where it failed
            _forget_segments()

    def reset_weights(self) -> None:
        try:
            super().reset_weights()
        finally:  # some may be others even where it failed
            _forget_segments()

    def sleep(self, level: int = 1) -> None:
        if (connector := _connector()) is not None:
            connector.unregister_kv_caches()
        if level > 1:
            _forget_segments()
        super().sleep(level)

    def discard(self, tags: tuple[str, ...]) -> None:
        connector = _connector()
        if connector is not None and "kv_cache" in tags and current_platform.is_sleep_mode_available():
            connector.unregister_kv_caches()
        super().discard(tags)

    def wake_up(self, tags: list[str] | None = None) -> None:
        super().wake_up(tags)
        if (connector := _connector()) is not None and (tags is None or "kv_cache" in tags):
            connector.restore_kv_caches()


def with_users_of_kv(config: KVCacheConfig, layers: Mapping[str, Any]) -> KVCacheConfig:
    """Return the same; layers without KV of their own have the spec of the layer whose KV they use."""
    copied = copy.deepcopy(config)
    for group in copied.kv_cache_groups:
        if isinstance(group.kv_cache_spec, UniformTypeKVCacheSpecs):
            specs = group.kv_cache_spec.kv_cache_specs
            for name, layer in layers.items():
                target = getattr(layer, "kv_sharing_target_layer_name", None)
                if target in specs:
                    specs.setdefault(name, specs[target])
    return copied


def _attach(worker: KVShareWorker) -> None:
    """Give the model to the connector, once."""
    if not worker.is_attached and (connector := _connector()) is not None:
        runner = worker.model_runner
        draft = draft_model_of(runner) if has_rows(worker.vllm_config) else None
        adapters, graphs = getattr(runner, "lora_manager", None), graph_passes(runner, worker.vllm_config)
        models = Models(runner.get_model(), draft, adapters, graphs, RunnerPrefill(worker))
        connector.attach_model(models)
        worker.is_attached = True


def _connector() -> KVShareConnector | None:
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    if isinstance(connector, KVShareMultiConnector):
        return connector.ours
    return connector if isinstance(connector, KVShareConnector) else None


def _forget_segments() -> None:
    if (connector := _connector()) is not None:
        connector.forget_segments()
