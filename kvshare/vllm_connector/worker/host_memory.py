"""
Host memory for segments, taken from the system at the start: its pages first, then CUDA pins them.

    pages       emptied by several threads: one alone takes half a second for each GiB, as CUDA would
    register    one call for all of the memory: a copy must not cross from one registered part to another

Both are done in a thread, so that the self-test can begin meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvshare import machine
from kvshare.vllm_connector.worker.copying import leave_vllm_cpus

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.device import Device

_MAX_THREADS = 8  # that empty pages: more wait for the memory
_PIECE_BYTES = 16 * 1024**2  # in one call, in which no other thread of this process can map memory
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE of Linux 5.14; Python's mmap has no name for it
_UNKNOWN = (errno.EINVAL, errno.ENOSYS)  # an older kernel, or another system


class PagesRefusedError(MemoryError):
    """The system does not give the pages. CUDA knows nothing of the memory then."""


class Taken(NamedTuple):
    """How long it took to reserve the pages and to register them."""

    reserve_s: float
    register_s: float


@contextmanager
def taken(buffer: torch.Tensor, device: Device) -> Iterator[Future[Taken]]:
    """
    Reserve and register host memory in a thread. It is done at the latest when the context ends.

    Raises:  in `result`: PagesRefusedError
    """
    with ThreadPoolExecutor(1, thread_name_prefix="kvshare-memory") as thread:
        yield thread.submit(_take, buffer, device)


def _take(buffer: torch.Tensor, device: Device) -> Taken:
    device.enter_thread()
    with suppress(AttributeError, OSError):  # then fewer threads have fewer processors
        leave_vllm_cpus()
    begin = time.perf_counter()
    reserve(buffer.data_ptr(), buffer.nbytes)
    reserved = time.perf_counter()
    device.register(buffer)
    return Taken(reserved - begin, time.perf_counter() - reserved)


def reserve(address: int, num_bytes: int) -> None:
    """
    Have the system give all pages of this memory now. Bytes are kept where the kernel can do that by itself;
    otherwise they are set to zero, so the memory must not be used yet.

    During a save it would take longer than the copies, and running out of memory would end the process.
    Raises:  PagesRefusedError
    """
    end = address + num_bytes
    borders = [address, *range(_page(address) + _PIECE_BYTES, end, _PIECE_BYTES), end]
    with ThreadPoolExecutor(min(_MAX_THREADS, machine.num_cores()), "kvshare-pages") as threads:
        for problem in threads.map(_reserve_piece, borders, borders[1:]):
            if problem:
                raise PagesRefusedError(
                    f"--kv-bytes takes {num_bytes / 2**30:.1f} GiB of host memory, which the system does not "
                    f"give ({os.strerror(problem)}): lower it"
                )


def _reserve_piece(start: int, end: int) -> int:
    """Return an error number, or 0."""
    problem = _populate(start, end)
    if problem in _UNKNOWN:
        ctypes.memset(start, 0, end - start)  # other threads go on meanwhile
        return 0
    return problem


def _populate(start: int, end: int) -> int:
    """Ask the kernel for all pages of [start, end). Returns its error number, or 0."""
    madvise = getattr(ctypes.CDLL(None, use_errno=True), "madvise", None)
    if madvise is None:
        return errno.ENOSYS
    first = _page(start)
    failed = madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(_POPULATE_WRITE))
    return ctypes.get_errno() if failed else 0


def _page(address: int) -> int:
    """Return the begin of a page."""
    return address // mmap.PAGESIZE * mmap.PAGESIZE
