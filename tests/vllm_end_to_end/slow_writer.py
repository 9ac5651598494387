"""
The worker class of a vLLM that writes its files piece by piece, so that a kill finds most of them unfinished.

Only vLLM imports it (`test_kills.py`). It replaces a call to the operating system, which nothing else can
slow down.
"""

from __future__ import annotations

import os
import time

from kvshare.tiers.files import Files
from kvshare.vllm_connector.workers import KVShareWorker

_PIECE_BYTES, _PIECE_S = 1 << 16, 0.1


class SlowWriter(KVShareWorker):
    """KVShare's worker class. To import this module is what makes its writes slow."""


def _write_a_piece(self: Files, descriptor: int, data: memoryview) -> int:
    time.sleep(_PIECE_S)
    return os.write(descriptor, data[:_PIECE_BYTES])


Files.write = _write_a_piece  # type: ignore[method-assign]  # on purpose
