"""What loads and saves ask of a pretended GPU: torch does it at once, without Triton and the driver."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvshare.vllm_connector.worker.batched_copy import copy_all
from kvshare.vllm_connector.worker.cuda import CudaGpu
from tests.kvshare.vllm_connector.worker.pretended_gpu import CUDA, Gpu

_OF_LOADS = ("up", "begin_load", "check", "scatter", "compare", "copy_blocks")
_CALLS = ("record", "wait", *_OF_LOADS, "gather", "sums", "down")


class OneStream(CudaGpu):
    """
    With the CPU as its device, tensors need not be pretended. What it was asked for is in `gpu.seen.calls`.

    `late_from`: what it is asked for from then on counts as not done.
    """

    def __init__(self, gpu: Gpu, device: torch.device = CUDA) -> None:
        self.late_from = float("inf")
        self._gpu = gpu
        self._device, self._kernels, self._block_kernels = device, None, None
        self._copy_batch, self._movements, self._reads_host = None, {}, False

    def register(self, buffer: torch.Tensor) -> None:
        self._gpu.register(buffer)

    def enter_thread(self) -> None:
        """There is one GPU."""

    def record(self, _: object) -> float:
        return time.perf_counter()

    def wait(self, *_: object) -> None:
        """All is done already."""

    def is_past(self, event: float) -> bool:
        return event < self.late_from

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def _copy(
        self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *, is_stable: bool
    ) -> None:
        copy_all(None, targets, sources, stream=0, is_stable=is_stable)

    def _to_host(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers if self._device.type == "cpu" else super()._to_host(numbers)

    @contextmanager
    def _in(self, _: object) -> Iterator[None]:
        yield

    def __getattribute__(self, name: str) -> Any:
        if name in _CALLS:
            self._gpu.seen.calls.append(name)
        return super().__getattribute__(name)
