"""
How fast pieces of pinned host memory are copied to and from the device: by the driver's batched copies,
and by our kernel, which addresses that memory. The connector uses the second where it can.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import numpy as np
import torch

from kvshare_lab.vllm.gpu.report import Figures

_SIZES = (4 << 20, 384 << 10, 64 << 10, 16 << 10)  # bytes; a load in three layers at a time has 384 KiB
_MOST_PIECES, _APART = 4096, 2  # pieces, and so many times their size from one to the next in host memory
_REPEATS = 3


def piece_rates(num_bytes: int = 1 << 28) -> Figures | None:
    """
    Bytes a second by the size of pieces, way and means; None without a CUDA device. Where a rate could not be
    measured, the class of its error.
    """
    if not torch.cuda.is_available():
        return None
    from kvshare.vllm_connector.worker.host_addresses import has_host_addresses

    host = torch.zeros(_APART * num_bytes, dtype=torch.uint8, pin_memory=True)
    try:
        has_kernel = has_host_addresses(torch.cuda.current_device(), host)
        device = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
        found = {str(size): _of_size(host, device, size, has_kernel=has_kernel) for size in _SIZES}
        del device
        return found
    finally:
        torch.cuda.empty_cache()  # a vLLM is started next to this process


def _of_size(host: torch.Tensor, device: torch.Tensor, size: int, *, has_kernel: bool) -> Figures:
    count = min(len(device) // size, _MOST_PIECES)
    here = [host[number * _APART * size :][:size] for number in range(count)]
    there = [device[number * size :][:size] for number in range(count)]
    by_kernel, num_bytes = partial(_by_kernel, here, device, size), count * size
    return {
        "to_device": {
            "driver": _rate(partial(_by_driver, there, here), num_bytes),
            "kernel": _rate(partial(by_kernel, up=True), num_bytes) if has_kernel else None,
        },
        "to_host": {
            "driver": _rate(partial(_by_driver, here, there), num_bytes),
            "kernel": _rate(partial(by_kernel, up=False), num_bytes) if has_kernel else None,
        },
    }


def _by_driver(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    from kvshare.vllm_connector.worker.batched_copy import copy_all, find_batch_function

    stream = torch.cuda.current_stream().cuda_stream
    copy_all(find_batch_function(), targets, sources, stream=stream, is_stable=True)


def _by_kernel(here: list[torch.Tensor], device: torch.Tensor, size: int, *, up: bool) -> None:
    from kvshare.vllm_connector.worker.kernel_host_tables import WORD_BYTES, cut
    from kvshare.vllm_connector.worker.kernels import copy_host

    words = size // WORD_BYTES
    addresses = [piece.data_ptr() for piece in here]
    offsets = np.arange(len(here)) * words
    copy_host(device, cut(np.array([addresses, offsets, np.full(len(here), words)], np.int64)), up=up)


def _rate(copy: Callable[[], None], num_bytes: int) -> float | str:
    """Of the median copy, by the device's clock, with what the host does meanwhile."""
    seconds: list[float] = []
    try:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # torch's own
            for _ in range(_REPEATS + 1):
                begin, end = _event(), _event()
                begin.record()
                copy()
                end.record()
                end.synchronize()
                seconds.append(begin.elapsed_time(end) / 1000)
    except Exception as exc:  # noqa: BLE001  the other rates, and all other parts, can be measured
        return type(exc).__name__
    return num_bytes / median(seconds[1:])


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's own
