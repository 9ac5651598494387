"""
Many runs of bytes between two buffers, host and device, by one call: cuMemcpyBatchAsync of CUDA 12.8.

Where the driver is older, or is ROCm's, torch copies each run. Runs that follow each other in both buffers
are joined first. Nothing here waits for a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_SYMBOL, _VERSION = b"cuMemcpyBatchAsync", 12080  # of the ABI: CUDA 13's has no place of the failed copy
_IN_STREAM_ORDER, _AT_ANY_TIME = 1, 3  # CUmemcpySrcAccessOrder
_NO_COPY = ctypes.c_size_t(-1).value  # an error that is no single copy's


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_uint), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    """CUmemcpyAttributes_v1. Places are hints for managed memory."""

    _fields_ = (
        ("source_access_order", ctypes.c_uint),
        ("source_place", _Location),
        ("target_place", _Location),
        ("flags", ctypes.c_uint),
    )


BATCH_FUNCTION = ctypes.CFUNCTYPE(  # it releases Python's lock
    ctypes.c_uint,  # CUresult
    ctypes.c_void_p,  # targets, an array of addresses
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # copies
    ctypes.POINTER(_Attributes),
    ctypes.POINTER(ctypes.c_size_t),  # the first copy of each of the attributes
    ctypes.c_size_t,  # attributes
    ctypes.POINTER(ctypes.c_size_t),  # receives the number of the copy that failed
    ctypes.c_void_p,  # stream
)
"""The type of cuMemcpyBatchAsync."""

BatchFunction = Callable[..., int]


@dataclass(frozen=True, slots=True)
class ByteRun:
    """Bytes to copy, and where they begin in each buffer."""

    target: int
    source: int
    num_bytes: int


def find_batch_function(driver: Any = None) -> BatchFunction | None:
    """The driver's function, or None if it has none. `driver`: libcuda, loaded if it is not given."""
    try:
        driver = driver or ctypes.CDLL("libcuda.so.1")
        find = driver.cuGetProcAddress_v2
    except (OSError, AttributeError):  # there is no driver, or it is older than CUDA 12
        return None
    address, found = ctypes.c_void_p(), ctypes.c_int(-1)
    error = find(
        _SYMBOL, ctypes.byref(address), ctypes.c_int(_VERSION), ctypes.c_uint64(0), ctypes.byref(found)
    )
    return BATCH_FUNCTION(address.value) if error == 0 and address.value else None


def copy_runs(
    function: BatchFunction | None,
    target: torch.Tensor,
    source: torch.Tensor,
    runs: list[ByteRun],
    *,
    stream: int,
    is_stable: bool,
) -> None:
    """
    Copy runs from one buffer to the other, in a stream. Their order among each other is undefined.

    `stream`: the handle of torch's current stream, not the default one. `is_stable`: nothing launched before
    still writes the source, as with host memory at rest, so that it may be read before its turn.

    Shapes:  target, source (bytes,) uint8; host memory must be registered
    Raises:  ValueError for a run outside of a buffer; RuntimeError if the driver refuses
    """
    joined = _joined(runs)
    _check(target, source, joined)
    if not len(joined):
        return
    if function is None:
        for to, start, size in joined.tolist():
            target[to : to + size].copy_(source[start : start + size], non_blocking=True)
        return
    if not stream:
        raise ValueError("batched copies cannot run in CUDA's default stream")
    targets, sources, sizes = np.ascontiguousarray(joined.T).astype(np.uint64)
    targets += np.uint64(target.data_ptr())
    sources += np.uint64(source.data_ptr())
    order = _AT_ANY_TIME if is_stable else _IN_STREAM_ORDER
    failed = ctypes.c_size_t(_NO_COPY)
    error = function(
        targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
        ctypes.byref(_Attributes(source_access_order=order)), ctypes.byref(ctypes.c_size_t(0)), 1,
        ctypes.byref(failed), stream,
    )  # fmt: skip
    if error:
        which = f", copy {failed.value} of {sizes[failed.value]} bytes" if failed.value < len(sizes) else ""
        raise RuntimeError(f"cuMemcpyBatchAsync: CUDA error {error} for {len(sizes)} copies{which}")


def _joined(runs: list[ByteRun]) -> NDArray[np.int64]:
    """(runs, 3): target, source, bytes; without empty ones, and one where the next begins at its end."""
    given = [(run.target, run.source, run.num_bytes) for run in runs if run.num_bytes]
    each: NDArray[np.int64] = np.array(given, np.int64).reshape(-1, 3)
    if not len(each):
        return each
    ends = each[:-1, :2] + each[:-1, 2:]
    begins = np.flatnonzero(np.concatenate([[True], (each[1:, :2] != ends).any(axis=1)]))
    sizes: NDArray[np.int64] = np.add.reduceat(each[:, 2:], begins)
    return np.concatenate([each[begins, :2], sizes], axis=1)


def _check(target: torch.Tensor, source: torch.Tensor, runs: NDArray[np.int64]) -> None:
    for name, buffer, begin in (("target", target, runs[:, 0]), ("source", source, runs[:, 1])):
        ends = begin + runs[:, 2]
        if (begin < 0).any() or (runs[:, 2] < 0).any() or (ends > buffer.nbytes).any():
            raise ValueError(
                f"copies of bytes {begin.min()} to {ends.max()} of the {name}, which has {buffer.nbytes}"
            )
