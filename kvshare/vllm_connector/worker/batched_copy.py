"""
Many tensors copied between host and device by one call of the driver: cuMemcpyBatchAsync of CUDA 12.8.

Where the driver is older, or is ROCm's, torch copies each tensor. Nothing here waits for a copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_SYMBOL, _VERSION = b"cuMemcpyBatchAsync", 12080  # the ABI's version: CUDA 13's does not name the failed copy
_IN_STREAM_ORDER, _AT_ANY_TIME = 1, 3  # CUmemcpySrcAccessOrder
_NO_COPY = ctypes.c_size_t(-1).value  # the error does not belong to one copy


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


def find_batch_function(driver: Any = None) -> BatchFunction | None:
    """Return the driver's function, or None if it has none. `driver`: libcuda, loaded by default."""
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


def copy_all(
    function: BatchFunction | None,
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    *,
    stream: int,
    is_stable: bool,
) -> None:
    """
    Copy each source to its target, in a stream. The order of these copies is undefined.

    `stream`: the handle of torch's current stream, which must not be the default one. `is_stable`: no earlier
    work of the stream writes the sources, so that they may be read before their turn.

    Shapes:  targets and sources of the same sizes and dtype, contiguous; host memory must be registered
    Raises:  ValueError for tensors of another form; RuntimeError if the driver refuses
    """
    for target, source in zip(targets, sources, strict=True):
        _check(target, source)
    if function is None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
        return
    if not stream:
        raise ValueError("batched copies cannot run in CUDA's default stream")
    to, start, sizes = _joined(targets, sources)
    if not len(sizes):
        return
    order = _AT_ANY_TIME if is_stable else _IN_STREAM_ORDER
    failed = ctypes.c_size_t(_NO_COPY)
    error = function(
        to.ctypes.data, start.ctypes.data, sizes.ctypes.data, len(sizes),
        ctypes.byref(_Attributes(source_access_order=order)), ctypes.byref(ctypes.c_size_t(0)), 1,
        ctypes.byref(failed), stream,
    )  # fmt: skip
    if error:
        which = f", copy {failed.value} of {sizes[failed.value]} bytes" if failed.value < len(sizes) else ""
        raise RuntimeError(f"cuMemcpyBatchAsync: CUDA error {error} for {len(sizes)} copies{which}")


def _check(target: torch.Tensor, source: torch.Tensor) -> None:
    if (target.shape, target.dtype) != (source.shape, source.dtype):
        raise ValueError(
            f"a copy of {source.dtype} {tuple(source.shape)} to {target.dtype} {tuple(target.shape)}"
        )
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError(f"a copy between strides {source.stride()} and {target.stride()}")


def _joined(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> NDArray[np.uint64]:
    """(3, copies): addresses of targets and of sources, and sizes. Copies adjacent in both are joined."""
    pairs = zip(targets, sources, strict=True)
    places = [(t.data_ptr(), s.data_ptr(), s.nbytes) for t, s in pairs if s.nbytes]
    pieces = np.array(places, np.uint64).reshape(-1, 3)
    if not places:
        return pieces.T
    follows = (pieces[1:, :2] == pieces[:-1, :2] + pieces[:-1, 2:]).all(axis=1)
    begins = np.flatnonzero(np.concatenate([[True], ~follows]))
    sizes: NDArray[np.uint64] = np.add.reduceat(pieces[:, 2:], begins)
    return np.ascontiguousarray(np.concatenate([pieces[begins, :2], sizes], axis=1).T)
