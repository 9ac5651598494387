"""
The worker class of a vLLM whose loads fail on demand: the first and every fifth one, once its
copies are written.

Only vLLM imports it (`servers.shared_vllm`). It replaces a method of the connector, which has no hook for it.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from kvshare.vllm_connector.worker.transfers import Transfers
from kvshare.vllm_connector.workers import KVShareWorker
from kvshare_lab.vllm.servers import FAULTS_VARIABLE

_EVERY = 5
_numbers, _write_copies = itertools.count(), Transfers._write_copies


class FailingWorker(KVShareWorker):
    """KVShare's worker class. To import this module is what makes its loads fail."""


def _write_or_fail(self: Transfers, *arguments: Any) -> Any:
    """Raises RuntimeError with the copies written, so that answers are wrong if those are used."""
    seconds = _write_copies(self, *arguments)
    if Path(os.environ[FAULTS_VARIABLE]).exists() and next(_numbers) % _EVERY == 0:
        raise RuntimeError("this load fails on purpose")
    return seconds


Transfers._write_copies = _write_or_fail  # type: ignore[assignment, method-assign]  # on purpose
