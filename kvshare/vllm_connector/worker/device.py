"""
What copies need of a device, for CUDA and for a CPU, and the times of its work.

    mark      a point in the order of work on vLLM's own stream. The host's clock would only time the launches
    run_after runs work after a mark, next to vLLM's stream, and times it without the wait for that mark
    staging   a buffer of fixed size on the device, between host memory and vLLM's cache
    reading   results on their way from vLLM's own stream to the host, which asks whether they have arrived

    CUDA      a stream of its own, a staging buffer, registered host memory: copies are DMA. Marks are events
    CPU       the thread that copies takes the place of the stream; rows are in host memory, nothing is
              staged, and results are there at once
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from vllm.platforms import current_platform
from vllm.v1.kv_offload.cpu.host_register import host_register

log = logging.getLogger("vllm.kvshare")

STAGING_BYTES = 128 * 1024**2  # what a CUDA worker leaves free for it, see `workers.py`

_POLL_S = 0.0002


class Reading:
    """
    Copies of results in host memory, which are whole when they have arrived. Used by vLLM's thread only.

    `has_arrived`: whether the device has made the copies; None if they were made before.
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
        """Whether they have arrived by then."""
        until = time.perf_counter() + timeout_s
        while not self.is_done and time.perf_counter() < until:
            time.sleep(_POLL_S)
        return self.is_done

    def arrays(self) -> list[NDArray[Any]]:
        """The results, when they have arrived."""
        assert self.is_done, "results are used when they have arrived"
        return [copy.numpy() for copy in self._copies]


class Device:
    """
    The CPU: work is done when its call returns. Used by one thread at a time, except for marks and readings.

    `reads_at_once`: whether a reading has arrived when it begins, on every rank.
    """

    reads_at_once = True

    def register(self, buffer: torch.Tensor) -> None:
        """Prepare host memory for fast copies."""

    def mark(self) -> Any:
        """The current point in the order of work on the device."""
        return time.perf_counter()

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two marks; None while the device has not reached the second."""
        return float(end - begin)

    def is_reached(self, mark: Any) -> bool:
        """Whether the device has come to a mark."""
        return True

    def read(self, *results: torch.Tensor) -> Reading:
        """Copy results of work on vLLM's own stream to the host. They are not written any more."""
        return Reading(results)

    def run_after(self, mark: Any, work: Callable[[], None]) -> float:
        """Do work that starts after the mark. Returns when it is done: the seconds from its start on."""
        began = self.mark()
        work()
        return float(self.mark() - began)

    def to_device(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """One batch of host rows on the device; the next batch reuses their memory."""
        return list(rows)

    def room_for(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Device memory of the rows' shapes, to be copied to the host by `to_host`."""
        return list(rows)

    def to_host(self, staged: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
        """Copy rows from the device's memory into host rows."""


class CudaDevice(Device):
    """Not run on a GPU yet: its calls of CUDA are tested with a stand-in for torch.cuda."""

    reads_at_once = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._staging = torch.empty(STAGING_BYTES, dtype=torch.uint8, device=device)

    def register(self, buffer: torch.Tensor) -> None:
        # vLLM's own function logs the error, and clears it: else the next launch of a kernel would raise it.
        if not host_register(buffer.data_ptr(), buffer.nbytes):
            log.warning(
                "kvshare: CUDA cannot register %d bytes of host memory: copies will be several times slower. "
                "A smaller --kv-bytes or a higher limit of locked memory (ulimit -l) may help",
                buffer.nbytes,
            )

    def mark(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float | None:
        return begin.elapsed_time(end) / 1000 if self.is_reached(end) else None

    def is_reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def read(self, *results: torch.Tensor) -> Reading:
        # Pinned, or the copies would wait. torch does not give this memory away before they are made.
        copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in results]
        for copy, result in zip(copies, results, strict=True):
            copy.copy_(result, non_blocking=True)
        mark = self.mark()
        return Reading(copies, lambda: self.is_reached(mark))

    def run_after(self, mark: Any, work: Callable[[], None]) -> float:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            began = self.mark()  # in this stream: reached when the rest of vLLM's step is over
            try:
                work()
                ended = self.mark()
            finally:
                self._stream.synchronize()
        return float(began.elapsed_time(ended)) / 1000

    def to_device(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        staged = self.room_for(rows)
        for target, source in zip(staged, rows, strict=True):
            target.copy_(source, non_blocking=True)
        return staged

    def room_for(self, rows: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        staged, start = [], 0
        for source in rows:
            room = self._staging[start : start + source.nbytes]
            if len(room) < source.nbytes:  # a single segment that is larger than the staging buffer
                room = torch.empty(source.nbytes, dtype=torch.uint8, device=self._device)
            staged.append(room.view(source.dtype).view(source.shape))
            start += -(-source.nbytes // 512) * 512
        return staged

    def to_host(self, staged: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
        for source, target in zip(staged, rows, strict=True):
            target.copy_(source, non_blocking=True)


def device_of_this_worker() -> Device:
    if current_platform.device_type != "cuda":
        return Device()
    # With its number: in a new thread "cuda" alone is GPU 0, whichever this rank has.
    return CudaDevice(torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """Work that was done for several requests together, and each one's share of it."""

    name: str
    begin: Any
    end: Any
    shares: dict[str, float]  # by request


class Times:
    """Collects the times of stages by request, some of which are known only later."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._pending: list[Stage] = []
        self._known: dict[str, dict[str, float]] = {}

    def add(self, name: str, begin: Any, end: Any, counts: dict[str, int]) -> None:
        """A stage between two marks; `counts` is each request's amount of its work."""
        total = sum(counts.values())
        shares = {request_id: count / total if total else 0.0 for request_id, count in counts.items()}
        self._pending.append(Stage(name, begin, end, shares))

    def note(self, request_id: str, seconds: Mapping[str, float]) -> None:
        """Stages of one request with known times."""
        by_stage = self._known.setdefault(request_id, {}) if seconds else {}
        for stage, value in seconds.items():
            by_stage[stage] = by_stage.get(stage, 0.0) + value

    def take(self) -> dict[str, dict[str, float]]:
        """Seconds by request and stage: all that became known since the last call."""
        waiting = []
        for stage in self._pending:
            seconds = self._device.seconds(stage.begin, stage.end)
            if seconds is None:
                waiting.append(stage)
                continue
            for request_id, share in stage.shares.items():
                self.note(request_id, {stage.name: seconds * share})
        self._pending = waiting
        known, self._known = self._known, {}
        return known


def batches(rows: Sequence[torch.Tensor]) -> Iterator[slice]:
    """Batches of rows that fit the staging buffer together; a batch has at least one."""
    start = num_bytes = 0
    for index, segment in enumerate(rows):
        size = -(-segment.nbytes // 512) * 512
        if index > start and num_bytes + size > STAGING_BYTES:
            yield slice(start, index)
            start, num_bytes = index, 0
        num_bytes += size
    if start < len(rows):
        yield slice(start, len(rows))
