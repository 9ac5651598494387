"""
What copies need of a device, which is another for CUDA and for a CPU. The protocol above is the same.

    mark      a point in the order of what vLLM's own stream was given
    beside    work that comes after a mark, and in nobody's way: it has been done when the context ends
    staging   device memory of a fixed size, through which rows go between the host's memory and vLLM's cache

    CUDA      a stream of its own, staging on the device, host memory that is registered: copies are DMA
    CPU       the thread that copies is the stream; the host's memory is the device's: nothing is staged
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
    """Used by one thread at a time but for `mark`."""

    def register(self, buffer: torch.Tensor) -> None:
        """Host memory that is going to be copied from and to."""

    def mark(self) -> Any:
        """Now, in the order of what the device was given."""

    def beside(self, mark: Any) -> Any:
        """A context: what is given to the device inside comes after the mark; it is done at the end."""

    def to_device(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Host rows, to be read on the device. Those of one batch; the next takes their place."""

    def room_for(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where the device may write what is then to be copied into these host rows."""

    def to_host(self, staged: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
        """Copy what was written there."""


class HostDevice:
    def register(self, buffer: torch.Tensor) -> None:
        pass

    def mark(self) -> None:
        """What the worker's thread did before is done."""

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
    """Not run for want of a GPU; what it asks of CUDA is tested with a module that stands in for it."""

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
            if len(room) < each.nbytes:  # a single segment that is larger than all of it
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
    """Which of the rows fit the staging together; at least one does."""
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
    """The arrays on a device, in one copy that waits for nothing."""
    sizes = [-(-array.nbytes // 16) * 16 for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for array, room in zip(arrays, torch.split(host, sizes), strict=True):
        room.numpy()[: array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    there = torch.split(host.to(device, non_blocking=True), sizes)
    return [
        room[: array.nbytes].view(torch.from_numpy(array[:0]).dtype).view(array.shape)
        for array, room in zip(arrays, there, strict=True)
    ]
