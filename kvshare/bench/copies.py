"""The bandwidth of copies within host memory, and to and from a device: what bounds loading and saving KV."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvshare.bench.harness import median

_NUM_BYTES = 256 * 2**20  # more than any processor's cache
_REPEATS = 5


def measure(num_bytes: int = _NUM_BYTES) -> dict[str, float | None]:
    """
    Bytes a second, the median of some copies of this size.

    Without a CUDA device only `host_to_host` is measured; the other rates are None.
    """
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    found: dict[str, float | None] = {"num_bytes": num_bytes}
    found["host_to_host"] = num_bytes / median(_seconds(target, source))
    for name, is_pinned in (("pinned", True), ("pageable", False)):
        found |= _device_rates(name, source, is_pinned=is_pinned)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # a vLLM is started beside this process
    return found


def _device_rates(name: str, host: torch.Tensor, *, is_pinned: bool) -> dict[str, float | None]:
    """To and from a device with this kind of host memory."""
    names = f"to_device_{name}", f"to_host_{name}"
    if not torch.cuda.is_available():
        return dict.fromkeys(names)
    near, device = host.pin_memory() if is_pinned else host, host.cuda()
    pairs = ((device, near), (near, device))
    return {way: host.nbytes / median(_seconds(*ends)) for way, ends in zip(names, pairs, strict=True)}


def copied_bytes_per_s(num_threads: int, num_bytes: int = _NUM_BYTES) -> float:
    """Bandwidth of memcpy between two buffers in host memory, the best of some copies."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8) for _ in range(2))
    with _threads(num_threads):
        return num_bytes / min(_seconds(target, source))


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(target: torch.Tensor, source: torch.Tensor) -> list[float]:
    """Of each copy but the first, which touches the pages."""
    seconds = []
    for _ in range(_REPEATS + 1):
        _wait()
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
