"""
A GPU of which only sizes and durations exist: tensors on it are torch's "meta" tensors.

What torch is asked to do on them costs a launch on the host and the bytes that it reads and writes on a
stream; copies from and to the host cost their bytes on one of two engines, one each way. Nothing is computed.

Streams wait for each other where the connector asks for it. Beside a forward pass of vLLM, which fills the
device, a kernel of another stream also waits until some of that pass's blocks have ended.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from kvshare_lab.device.clock import Clock
from kvshare_lab.device.profile import Costs

THERE = torch.device("meta")
MAIN = "vllm"  # the stream of vLLM's own work
_ALLOCATING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_SMALL_BYTES = 2**20
_SELECTING = ("index_select", "index", "gather")  # what they read of their first argument is what they make


@dataclass(slots=True)
class Work:
    """What was asked of the device, and what the host did with bytes. Bytes are those that cross, or move."""

    launches: int = 0
    calls: int = 0  # of torch on tensors of the device or for it, launches and views alike
    waits: int = 0  # of the host for the device
    bytes_up: int = 0
    bytes_down: int = 0
    bytes_moved: int = 0  # read and written in the device's memory
    bytes_checked: int = 0  # by the host
    passes: int = 0  # over placeholders

    def to_json(self) -> dict[str, int]:
        return asdict(self)


class SimulatedGpu(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """A context in which torch's calls on the device are charged to the actor that makes them."""

    def __init__(self, costs: Costs, clock: Clock) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self.costs, self.clock = costs, clock
        self.work: defaultdict[str, Work] = defaultdict(Work)  # by request; "" is everything else
        self._free_at: defaultdict[str, float] = defaultdict(float)  # by stream and by engine
        self.kernels: defaultdict[str, int] = defaultdict(int)  # of other streams than vLLM's
        self._own = threading.local()
        self._rng = torch.Generator().manual_seed(0)

    @property
    def stream(self) -> str:
        return getattr(self._own, "stream", MAIN)

    @contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        before, self._own.stream = self.stream, name
        try:
            yield
        finally:
            self._own.stream = before

    @contextmanager
    def on_behalf_of(self, request_id: str) -> Iterator[None]:
        """Charge what is done meanwhile to a request."""
        before, self._own.request = self.request, request_id
        try:
            yield
        finally:
            self._own.request = before

    @property
    def request(self) -> str:
        return getattr(self._own, "request", "")

    @property
    def charged(self) -> Work:
        """Of the request that the current actor works for."""
        return self.work[self.request]

    def reached_at(self, stream: str | None = None) -> float:
        """When a stream has done all that it was given so far."""
        return max(self.clock.now(), self._free_at[stream or self.stream])

    def hold(self, at: float) -> None:
        """The current stream goes on at this time, or later."""
        self._free_at[self.stream] = max(self._free_at[self.stream], at)

    def wait_until(self, at: float) -> None:
        """The host waits for the device."""
        self.charged.waits += 1
        self.clock.sleep_until(at)

    def launch(self, seconds: float, *, engine: str | None = None) -> None:
        """The host launches work for the current stream, which takes so long there."""
        self.charged.launches += 1
        self.clock.spend(self.costs.launch_s)
        begin = self.reached_at()
        if engine is not None:
            begin = max(begin, self._free_at[engine])
            self._free_at[engine] = begin + seconds
        elif self.stream != MAIN:
            self.kernels[self.stream] += 1
            begin += self.costs.behind_s if begin < self._free_at[MAIN] else 0.0
        self._free_at[self.stream] = begin + seconds

    def call(self) -> None:
        """A call of the host that launches nothing."""
        self.charged.calls += 1
        self.clock.spend(self.costs.call_s)

    def copy_up(self, num_bytes: int) -> None:
        """From registered memory of the host."""
        self.charged.bytes_up += num_bytes
        self.launch(num_bytes / self.costs.pcie_bytes_per_s, engine=_engine("up", num_bytes))

    def copy_down(self, num_bytes: int) -> None:
        self.charged.bytes_down += num_bytes
        self.launch(num_bytes / self.costs.pcie_bytes_per_s, engine=_engine("down", num_bytes))

    def move(self, num_bytes: int) -> None:
        """A kernel that reads and writes so many bytes of the device's memory."""
        self.charged.bytes_moved += num_bytes
        self.launch(num_bytes / self.costs.memory_bytes_per_s)

    def check(self, num_bytes: int) -> None:
        """The host reads bytes of KV."""
        self.charged.bytes_checked += num_bytes
        self.clock.spend(num_bytes / self.costs.check_bytes_per_s)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = [each for each in tree_iter((args, kwargs)) if isinstance(each, torch.Tensor)]
        is_there = any(each.is_meta for each in given)
        if name == "copy_" and given[0].is_meta != given[1].is_meta:
            self._copy(given[1], goes_up=given[0].is_meta)
            return given[0]
        if name == "_to_copy" and is_there and kwargs.get("device") == torch.device("cpu"):
            return self._fetched(given[0])
        if is_there:
            self.call()
        result = func(*args, **kwargs)
        if name == "_to_copy" and not is_there and kwargs.get("device") == THERE:
            self._copy(given[0], goes_up=True)
        elif is_there and name not in _ALLOCATING:
            made = [each for each in tree_iter(result) if isinstance(each, torch.Tensor)]
            if not name.endswith("_") and "out" not in kwargs and _are_views(made, given):
                return result
            read = [*made, *given[1:]] if name in _SELECTING else given
            self.move(sum(map(_num_bytes, [*read, *made])))
        return result

    def _copy(self, source: torch.Tensor, *, goes_up: bool) -> None:
        (self.copy_up if goes_up else self.copy_down)(source.nbytes)

    def _fetched(self, source: torch.Tensor) -> torch.Tensor:
        """What the host reads and waits for. No values exist, so they are drawn."""
        self.copy_down(source.nbytes)
        self.wait_until(self.reached_at())
        return self.drawn(source)

    def drawn(self, source: torch.Tensor) -> torch.Tensor:
        """Values in host memory in place of those that do not exist."""
        return torch.rand(source.shape, generator=self._rng).to(source.dtype)


def _engine(way: str, num_bytes: int) -> str | None:
    """
    Which copies follow each other. Small ones, such as tables, pass between the others: one whose stream has
    to wait keeps no engine.
    """
    return way if num_bytes > _SMALL_BYTES else None


def _are_views(made: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> bool:
    """Whether no memory was written. Under inference mode torch reports what makes a view, not the view."""
    known = {each.untyped_storage()._cdata for each in given}
    return all(each.untyped_storage()._cdata in known for each in made)


def _num_bytes(tensor: torch.Tensor) -> int:
    """That an operation reads or writes: expanded dimensions are read once."""
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride or length == 0 else 1
    return size
