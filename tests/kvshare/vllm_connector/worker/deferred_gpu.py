"""
A GPU that does what it was asked for when the test says: stream by stream, in the order of each, and not
before what a stream waits for. Its memory is the host's.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvshare.vllm_connector.worker.device import GpuDevice
from kvshare.vllm_connector.worker.gpu import Stream
from kvshare.vllm_connector.worker.gpu_copies import Lane
from tests.kvshare.vllm_connector.worker.one_stream import OneStream

if TYPE_CHECKING:
    import torch

_LATER = ("up", "check", "scatter", "copy_blocks", "gather", "down")


class Mark:
    """`at`: the GPU's time when it came here; None before."""

    at: float | None = None


class DeferredGpu(OneStream):
    """`is_eager`: a host that looks finds everything done. `is_lost`: it finds an error."""

    def __init__(self) -> None:
        import torch

        from tests.kvshare.vllm_connector.worker.pretended_gpu import Gpu

        super().__init__(Gpu(), torch.device("cpu"))
        self.now = 0.0
        self.is_eager = self.is_lost = False
        self._lock = threading.RLock()  # vLLM's thread and the one that copies
        self._asked: dict[Stream, deque[Mark | tuple[Mark] | Callable[[], Any]]] = {}
        own = {"up": Stream.UP, "gather": Stream.GATHER, "down": Stream.DOWN, "copy_blocks": Stream.BLOCKS}
        for name in _LATER:
            setattr(self, name, self._later(own.get(name, Stream.WRITE), getattr(self, name)))

    def _later(self, stream: Stream, work: Callable[..., None]) -> Callable[..., None]:
        return lambda *given: self.ask(stream, lambda: work(*given))

    def ask(self, stream: Stream, work: Mark | tuple[Mark] | Callable[[], Any]) -> None:
        with self._lock:
            self._asked.setdefault(stream, deque()).append(work)

    def record(self, stream: Any) -> Any:
        mark = Mark()
        self.ask(stream, mark)
        return mark

    def wait(self, *given: Any) -> None:
        stream, mark = given
        self.ask(stream, (mark,))

    def is_past(self, event: Any) -> bool:
        if self.is_lost:
            raise RuntimeError("an illegal memory access was encountered")
        if self.is_eager:
            self.run()
        return event.at is not None

    def seconds(self, begin: Any, end: Any) -> Any:
        return None if None in (begin.at, end.at) else end.at - begin.at

    def compare(self, begun: Any) -> torch.Tensor:
        import torch

        found = torch.zeros(begun.load.num_pieces, dtype=torch.bool)
        self.ask(Stream.WRITE, lambda: found.copy_(begun.found != begun.expected))
        return found

    def sums(self, staging: torch.Tensor, batch: Any) -> torch.Tensor:
        import torch

        found = torch.zeros(sum(part.part.num_pieces for part in batch), dtype=torch.int64)
        self.ask(Stream.GATHER, lambda: found.copy_(self._sums(staging, batch)))
        return found

    def run(self, *streams: Stream, marks: int | None = None) -> None:
        """These streams, or all, as far as they can; of a single one up to so many marks more."""
        import torch

        going = True
        with self._lock, torch.inference_mode():
            while going:
                going = False
                for stream in streams or tuple(self._asked):
                    while self._can(stream) and marks != 0:
                        each = self._asked[stream].popleft()
                        going = True
                        if isinstance(each, Mark):
                            each.at = self.now
                            marks = None if marks is None else marks - 1
                        elif not isinstance(each, tuple):
                            each()

    def run_until(self, mark: Mark) -> None:
        """As little as possible, batch by batch."""
        while mark.at is None:
            self.run(Stream.UP)
            self.run(Stream.WRITE, marks=1)

    def _can(self, stream: Stream) -> bool:
        asked = self._asked.get(stream)
        if not asked:
            return False
        return not isinstance(first := asked[0], tuple) or first[0].at is not None


def deferred_device(buffer_bytes: int) -> tuple[GpuDevice, DeferredGpu]:
    """With two staging buffers each way."""
    made = GpuDevice.__new__(GpuDevice)
    made._gpu = gpu = DeferredGpu()
    made._loads, made._saves = (Lane(gpu, num_buffers=2, buffer_bytes=buffer_bytes) for _ in range(2))
    return made, gpu
