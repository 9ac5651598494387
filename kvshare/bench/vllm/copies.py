"""What copies between device and host memory reach, pinned and pageable: the bounds of loads and saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from kvshare.bench.harness import median

_MIB = 2**20
_REPEATS = 5


def measure(num_bytes: int = 256 * _MIB) -> dict[str, Any]:
    """
    Bytes a second, in the middle of some copies of this size. Without a CUDA device only those within host
    memory; the others are null.
    """
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    found: dict[str, Any] = {
        "num_bytes": num_bytes,
        "host_to_host": _rate(num_bytes, lambda: target.copy_(source)),
    }
    if not torch.cuda.is_available():
        names = ("pinned", "pageable")
        return {**found, **{f"{way}_{name}": None for name in names for way in ("to_device", "to_host")}}
    device = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    for name, host in (("pinned", source.pin_memory()), ("pageable", target)):
        found[f"to_device_{name}"] = _rate(num_bytes, _copying(device, host))
        found[f"to_host_{name}"] = _rate(num_bytes, _copying(host, device))
    del device
    torch.cuda.empty_cache()  # a vLLM is started beside this process
    return found


def _copying(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _rate(num_bytes: int, copy: Callable[[], object]) -> float:
    """The first copy touches the pages and is not counted."""
    seconds = []
    for _ in range(_REPEATS + 1):
        _wait()
        began = time.perf_counter()
        copy()
        _wait()
        seconds.append(time.perf_counter() - began)
    return num_bytes / median(seconds[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
