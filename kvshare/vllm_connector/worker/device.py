"""
What copies need of a device, for CUDA and for a CPU.

    mark      a point in the order of work on vLLM's own stream
    beside    a context: work inside starts after a mark, beside vLLM's stream, and is done when it ends
    staging   a buffer of fixed size on the device, between host memory and vLLM's cache

    CUDA      a stream of its own, a staging buffer, registered host memory: copies are DMA
    CPU       the thread that copies takes the place of the stream; rows are in host memory, nothing is staged
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

log = logging.getLogger("vllm.kvshare")

STAGING_BYTES = 128 * 1024**2  # what a CUDA worker leaves free for it, see `workers.py`


class Device(Protocol):
    """Used by one thread at a time, except `mark`."""

    def register(self, buffer: torch.Tensor) -> None:
        """Prepare host memory for fast copies."""

    def mark(self) -> Any:
        """The current point in the order of work on the device."""

    def beside(self, mark: Any) -> Any:
        """A context: work inside starts after the mark, and is done when the context ends."""

    def to_device(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One batch of host rows on the device; the next batch reuses their memory."""

    def room_for(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Device memory of the rows' shapes, to be copied to the host by `to_host`."""

    def to_host(self, staged: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
        """Copy rows from the device's memory into host rows."""


class HostDevice:
    """The CPU: host rows are used where they are."""

    def register(self, buffer: torch.Tensor) -> None:
        pass

    def mark(self) -> None:
        """Work on the CPU is done when its call returns."""

    @contextmanager
    def beside(self, mark: None) -> Iterator[None]:
        yield

    def to_device(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(rows)

    def room_for(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(rows)

    def to_host(self, staged: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
        pass


class CudaDevice:
    """Not run on a GPU yet: its calls of CUDA are tested with a stand-in for torch.cuda."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device)

    def register(self, buffer: torch.Tensor) -> None:
        code = int(torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0))  # type: ignore[no-untyped-call]
        if code:
            log.warning(
                "kvshare: CUDA cannot register %d bytes of host memory (error %d): copies will be several "
                "times slower. A smaller --kv-bytes or a higher limit of locked memory (ulimit -l) may help",
                buffer.nbytes,
                code,
            )

    def mark(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def beside(self, mark: Any) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            try:
                yield
            finally:
                self._stream.synchronize()

    def to_device(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        staged = self.room_for(rows)
        for target, source in zip(staged, rows, strict=True):
            target.copy_(source, non_blocking=True)
        return staged

    def room_for(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        staged, start = [], 0
        for each in rows:
            room = self._staging[start : start + each.nbytes]
            if len(room) < each.nbytes:  # a single segment that is larger than the staging buffer
                room = torch.empty(each.nbytes, dtype=torch.uint8, device=self._device)
            staged.append(room.view(each.dtype).view(each.shape))
            start += -(-each.nbytes // 512) * 512
        return staged

    def to_host(self, staged: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
        for source, target in zip(staged, rows, strict=True):
            target.copy_(source, non_blocking=True)


def device_of(device: torch.device) -> Device:
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def batches(rows: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Batches of rows that fit the staging buffer together; a batch has at least one."""
    start = num_bytes = 0
    for index, each in enumerate(rows):
        size = -(-each.nbytes // 512) * 512
        if index > start and num_bytes + size > STAGING_BYTES:
            yield slice(start, index)
            start, num_bytes = index, 0
        num_bytes += size
    if start < len(rows):
        yield slice(start, len(rows))


def to_device(device: torch.device, *arrays: NDArray[Any]) -> list[torch.Tensor]:
    """The arrays as tensors on a device, in one non-blocking copy."""
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, room in zip(arrays, torch.split(host, sizes), strict=True):
        room.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = torch.split(host.to(device, non_blocking=True), sizes)
    return [
        room[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, room in zip(arrays, there, strict=True)
    ]
