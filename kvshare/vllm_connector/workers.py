"""
The worker class for `--worker-cls`: the platform's own worker, which also gives its model to the connector.

vLLM gives connectors everything but the model. `--worker-cls` is a documented option: nothing is patched.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from kvshare.vllm_connector.connector import KVShareConnector
from kvshare.vllm_connector.worker.device import STAGING_BYTES

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
    """

    def determine_available_memory(self) -> int:
        """Leaves room for the staging buffer; vLLM would use all memory for its KV cache."""
        available = int(super().determine_available_memory())
        return available - STAGING_BYTES if current_platform.is_cuda_alike() else available

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


def _connector() -> KVShareConnector | None:
    connector = get_kv_transfer_group() if has_kv_transfer_group() else None
    return connector if isinstance(connector, KVShareConnector) else None


def _forget_segments() -> None:
    if (connector := _connector()) is not None:
        connector.forget_segments()
