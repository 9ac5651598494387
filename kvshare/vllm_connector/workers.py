"""
The worker class for `--worker-cls`: the platform's own, which also hands its model to the connector.

vLLM gives connectors everything but the model. A worker class is a documented option, and subclassing it is
all that is needed; nothing of vLLM is changed.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.platforms import current_platform

from kvshare.vllm_connector.connector import KVShareConnector
from kvshare.vllm_connector.worker.device import STAGING_BYTES

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
elif current_platform.is_xpu():  # nothing is shared there, and it is served
    from vllm.v1.worker.xpu_worker import XPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class KVShareWorker(PlatformWorker):
    """
    Hands the model over when it is loaded, its caches are bound, and nothing has been served.

    New weights take the KV of the old ones with them, also where nobody asks for `reset_connector`.
    """

    def determine_available_memory(self) -> int:
        """Less what copies are staged in: vLLM would give all of it to its cache."""
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
