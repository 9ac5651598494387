"""
The device of this worker: times its work, and makes the copies of loads and saves.

    mark     a point in the order of work on vLLM's own stream. The host's clock would only time the launches
    reading  results on their way from vLLM's own stream to the host, which asks whether they have arrived

    CPU     the copying thread copies itself            host_copies.py
    GPU     the copying thread launches copies          gpu_copies.py, by the calls of gpu.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform

from delta_tree import Span
from kvshare import machine
from kvshare.vllm_connector.worker.block_copies import (
    FindBlockCopies,
    GpuBlockCopies,
    HostBlockCopies,
)
from kvshare.vllm_connector.worker.copy_writer import RowCopy
from kvshare.vllm_connector.worker.copying import LoadWork, Work
from kvshare.vllm_connector.worker.cuda import CudaGpu
from kvshare.vllm_connector.worker.gpu import Gpu, Stream
from kvshare.vllm_connector.worker.gpu_copies import GpuLoad, GpuSave, Lane
from kvshare.vllm_connector.worker.host_copies import HostLoad, HostSave
from kvshare.vllm_connector.worker.paged_cache import PagedCache
from kvshare.vllm_connector.worker.segment_store import Stored

STAGING_BYTES = 256 * 1024**2  # a buffer holds all heads of a large segment: 36 MiB for an 8 B model
# Memory that a GPU worker leaves free, see `workers.py`: for staging, tables, and passes that listen.
RESERVED_BYTES = STAGING_BYTES + 256 * 1024**2
_BUFFERS_OF_LANE = 2  # one is filled while the other is emptied


_POLL_S = 0.0002


class Reading:
    """
    Copies of results in host memory, which may be read once they have arrived. Used by vLLM's thread only.

    `has_arrived`: asks whether the device has made the copies; None if they are made already.
    """

    def __init__(self, copies: Sequence[torch.Tensor], has_arrived: Callable[[], bool] | None = None) -> None:
        self._copies = copies
        self._has_arrived = has_arrived

    @property
    def is_done(self) -> bool:
        if self._has_arrived is not None and self._has_arrived():
            self._has_arrived = None
        return self._has_arrived is None

    def wait(self, timeout_s: float) -> bool:
        """Wait until they have arrived, at most `timeout_s` seconds. Returns whether they have."""
        until = time.perf_counter() + timeout_s
        while not self.is_done and time.perf_counter() < until:
            time.sleep(_POLL_S)
        return self.is_done

    def arrays(self) -> list[NDArray[Any]]:
        """Return the results, which must have arrived."""
        assert self.is_done, "results are used when they have arrived"
        return [copy.numpy() for copy in self._copies]


class Device:
    """
    The CPU: work is done when its call returns.

    `reads_at_once`: whether a reading has arrived as soon as it begins, on every rank.
    """

    reads_at_once = True

    def register(self, buffer: torch.Tensor) -> None:
        """Prepare host memory for fast copies."""

    def enter_thread(self) -> None:
        """Prepare the thread that copies, which calls this first."""

    def simplify(self) -> bool:
        """Copy without our own kernels from now on. Returns whether that changes anything."""
        return False

    def mark(self) -> Any:
        """Return a mark of the current point in the order of work on the device. On vLLM's thread."""
        return time.perf_counter()

    def is_past(self, mark: Any) -> bool:
        """Return whether the device has reached the mark."""
        return True

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Return the seconds between two marks; None while the device has not reached the second one."""
        return float(end - begin)

    def read(self, *results: torch.Tensor) -> Reading:
        """Copy results of work on vLLM's own stream to the host. Nothing may write them after this."""
        return Reading(results)

    def load(self, cache: PagedCache, find_copies: Callable[[], Sequence[RowCopy]], *, mark: Any) -> LoadWork:
        """Make the work of copying from segments into blocks, which are written after the mark."""
        return HostLoad(cache, find_copies)

    def copy_blocks(self, cache: PagedCache, find_copies: FindBlockCopies, *, mark: Any) -> Work:
        """Make the work of copying from blocks into others; both are used after the mark."""
        return HostBlockCopies(cache, find_copies)

    def save(
        self,
        cache: PagedCache,
        block_ids: Sequence[int],
        targets: Sequence[tuple[Stored, Span]],
        *,
        mark: Any,
    ) -> Work:
        """Make the work of copying from blocks, which are read after the mark, into segments."""
        return HostSave(cache, block_ids, targets)


class GpuDevice(Device):
    """A GPU, real or not."""

    reads_at_once = False

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._loads, self._saves = (
            Lane(gpu, num_buffers=_BUFFERS_OF_LANE, buffer_bytes=STAGING_BYTES // 2 // _BUFFERS_OF_LANE)
            for _ in range(2)
        )

    def register(self, buffer: torch.Tensor) -> None:
        self._gpu.register(buffer)

    def enter_thread(self) -> None:
        self._gpu.enter_thread()

    def simplify(self) -> bool:
        return self._gpu.simplify()

    def mark(self) -> Any:
        return self._gpu.record(Stream.VLLM)

    def is_past(self, mark: Any) -> bool:
        return self._gpu.is_past(mark)

    def seconds(self, begin: Any, end: Any) -> float | None:
        return self._gpu.seconds(begin, end)

    def read(self, *results: torch.Tensor) -> Reading:
        copies = [self._gpu.read(result) for result in results]
        mark = self.mark()
        return Reading(copies, lambda: self._gpu.is_past(mark))

    def load(self, cache: PagedCache, find_copies: Callable[[], Sequence[RowCopy]], *, mark: Any) -> LoadWork:
        return GpuLoad(self._loads, self._gpu, cache, find_copies, mark)

    def copy_blocks(self, cache: PagedCache, find_copies: FindBlockCopies, *, mark: Any) -> Work:
        return GpuBlockCopies(self._gpu, cache, find_copies, mark)

    def save(
        self,
        cache: PagedCache,
        block_ids: Sequence[int],
        targets: Sequence[tuple[Stored, Span]],
        *,
        mark: Any,
    ) -> Work:
        return GpuSave(self._saves, self._gpu, cache, block_ids, targets, mark)


def device_of_this_worker() -> Device:
    if current_platform.device_type != "cuda":
        return Device()
    # With its number: in a new thread "cuda" alone means GPU 0, whichever GPU this rank has.
    return GpuDevice(CudaGpu(torch.device("cuda", torch.cuda.current_device())))


def name_of_this_device() -> str:
    """Describe this device in words, with all that its speed depends on."""
    if current_platform.device_type == "cuda":
        return str(torch.cuda.get_device_name())
    return f"{machine.processor()}, {machine.num_cores()} cores, {torch.get_num_threads()} threads"
