"""
The worker class for `--worker-cls`: the platform's own worker, which also gives its model to the connector.

vLLM gives connectors everything but the model. `--worker-cls` is a documented option: nothing is patched.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from kvshare.vllm_connector.connector import KVShareConnector
from kvshare.vllm_connector.worker.device import RESERVED_BYTES

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
        """Leaves room for what the connector needs; vLLM would use all memory for its KV cache."""
        available = int(super().determine_available_memory())
        return available - RESERVED_BYTES if current_platform.is_cuda_alike() else available

    def compile_or_warm_up_model(self) -> Any:
        result = super().compile_or_warm_up_model()
        if (connector := _connector()) is not None:
            connector.attach_model(self.model_runner.get_model())
        return result

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)
        _forget_segments()

    def update_weights(self, *args: Any, **kwargs: Any) -> None:
        super().update_weights(*args, **kwargs)
        _forget_segments()

    def finish_weight_update(self) -> None:
        super().finish_weight_update()
        _forget_segments()

    def reset_weights(self) -> None:
        super().reset_weights()
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


def _connector() -> KVShareConnector | None:
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    return connector if isinstance(connector, KVShareConnector) else None


def _forget_segments() -> None:
    if (connector := _connector()) is not None:
        connector.forget_segments()
