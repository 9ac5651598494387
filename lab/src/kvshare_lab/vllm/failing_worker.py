"""
The worker class of a vLLM whose loads fail on demand: the first and every fifth one, once its
copies are written.

Only vLLM imports it (`servers.shared_vllm`). It replaces a method of the connector, which has no hook for it.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvshare.vllm_connector.worker.gpu_copies import GpuLoad
from kvshare.vllm_connector.worker.host_copies import HostLoad
from kvshare.vllm_connector.workers import KVShareWorker
from kvshare_lab.vllm.servers import FAULTS_VARIABLE

_EVERY = 5
_numbers = itertools.count()


class FailingWorker(KVShareWorker):
    """KVShare's worker class. To import this module is what makes its loads fail."""


def _failing(finish: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def finish_or_fail(load: Any) -> Any:
        """Raises RuntimeError with the copies written, so that answers are wrong if those are used."""
        seconds = finish(load)
        if Path(os.environ[FAULTS_VARIABLE]).exists() and next(_numbers) % _EVERY == 0:
            raise RuntimeError("this load fails on purpose")
        return seconds

    return finish_or_fail


HostLoad.finish = _failing(HostLoad.finish)  # type: ignore[assignment, method-assign]  # on purpose
GpuLoad.finish = _failing(GpuLoad.finish)  # type: ignore[assignment, method-assign]  # on purpose
