"""
Memory that the host may not touch: reading or writing a byte of it ends the process that does.

A device's copies open it for themselves. So that a touch is a result and not the end of all tests, work next
to closed memory is done in a child process.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TOUCHED = -signal.SIGSEGV  # the exit code of a child that touched closed memory
_NONE, _READ_AND_WRITE = 0, 3  # PROT_NONE; PROT_READ | PROT_WRITE
_MAX_S = 60  # a child that hangs ends


class ClosedMemory:
    """Pages of their own. Open until `closed`."""

    def __init__(self, num_bytes: int) -> None:
        import torch

        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.buffer = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
        self._is_closed = False

    @contextmanager
    def closed(self) -> Iterator[None]:
        self._protect(_NONE)
        self._is_closed = True
        try:
            yield
        finally:
            self._is_closed = False
            self._protect(_READ_AND_WRITE)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """For a copy of the device."""
        was_closed = self._is_closed
        self._protect(_READ_AND_WRITE)
        yield
        self._protect(_NONE if was_closed else _READ_AND_WRITE)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        start = self.buffer.data_ptr()
        return start <= tensor.data_ptr() < start + self.buffer.nbytes

    def _protect(self, allowed: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        address, size = ctypes.c_void_p(self.buffer.data_ptr()), ctypes.c_size_t(self.buffer.nbytes)
        if libc.mprotect(address, size, allowed):
            raise OSError(ctypes.get_errno(), "mprotect")


def exit_code_of(work: Callable[[], None]) -> int:
    """Of a child process that does the work: 0, `TOUCHED`, or 1 after any exception, which is printed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(_MAX_S)
            work()
            code = 0
        except BaseException:  # noqa: BLE001  nothing may go on in the child
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
