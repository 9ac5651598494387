"""Host memory at the start: all pages are there before it is registered, next to other work."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

MIB = 2**20


def mapped(num_bytes: int) -> torch.Tensor:
    """Pages of their own, which nobody has touched."""
    import torch

    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def num_missing(buffer: torch.Tensor) -> int:
    """The pages that the kernel has not given yet."""
    libc = ctypes.CDLL(None, use_errno=True)
    found = (ctypes.c_ubyte * (buffer.nbytes // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(buffer.data_ptr()), ctypes.c_size_t(buffer.nbytes), found) == 0
    return sum(not page & 1 for page in found)


def answers(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The kernel answers so when it is asked for pages."""
    from kvshare.vllm_connector.worker import host_memory

    monkeypatch.setattr(host_memory, "_populate", lambda *_: number)


@pytest.mark.parametrize("problem", [None, errno.EINVAL], ids=["linux 5.14", "an older kernel"])
@pytest.mark.parametrize("num_bytes", [mmap.PAGESIZE, 3 * MIB, 200 * MIB])
def test_all_pages_are_there(problem: int | None, num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are empty, in one piece or in several."""
    from kvshare.vllm_connector.worker.host_memory import reserve

    if problem is not None:
        answers(monkeypatch, problem)
    buffer = mapped(num_bytes)
    assert num_missing(buffer) == num_bytes // mmap.PAGESIZE
    reserve(buffer.data_ptr(), buffer.nbytes)
    assert num_missing(buffer) == 0
    assert not buffer.any()


@pytest.mark.parametrize("problem", [None, errno.EINVAL], ids=["linux 5.14", "an older kernel"])
@pytest.mark.parametrize(("start", "end"), [(1, 2), (100, 5000), (5000, 3 * MIB + 1)])
def test_memory_next_to_it_stays(
    problem: int | None, start: int, end: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small buffer begins and ends in the middle of pages that others use."""
    from kvshare.vllm_connector.worker.host_memory import reserve

    if problem is not None:
        answers(monkeypatch, problem)
    whole = mapped(4 * MIB)
    whole[:] = 7
    reserve(whole[start:end].data_ptr(), end - start)
    assert bool((whole[:start] == 7).all())
    assert bool((whole[end:] == 7).all())


def test_a_system_that_gives_no_pages_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """What an operator can do is in it."""
    from kvshare.vllm_connector.worker.host_memory import reserve

    answers(monkeypatch, errno.ENOMEM)
    buffer = mapped(MIB)
    with pytest.raises(MemoryError, match=rf"--kv-bytes takes 0\.0 GiB.*{os.strerror(errno.ENOMEM)}.*lower"):
        reserve(buffer.data_ptr(), buffer.nbytes)


def noting(register: Callable[[torch.Tensor], None]) -> tuple[object, list[str]]:
    """A device, and the threads that entered it."""
    from kvshare.vllm_connector.worker.device import Device

    entered: list[str] = []

    class Noting(Device):
        def enter_thread(self) -> None:
            entered.append(threading.current_thread().name)

        def register(self, buffer: torch.Tensor) -> None:
            assert threading.current_thread().name in entered
            register(buffer)

    return Noting(), entered


def test_it_is_taken_next_to_other_work() -> None:
    """In another thread: pages first. The end of the context waits for it."""
    from kvshare.vllm_connector.worker.host_memory import taken

    buffer, goes_on, missing = mapped(5 * MIB), threading.Event(), list[int]()

    def register(registered: torch.Tensor) -> None:
        assert goes_on.wait(60)
        assert registered is buffer
        missing.append(num_missing(buffer))

    device, entered = noting(register)
    with taken(buffer, device) as memory:  # type: ignore[arg-type]  # a Device
        assert not memory.done()
        goes_on.set()
    assert memory.done()
    assert missing == [0]
    assert threading.current_thread().name not in entered
    took = memory.result()
    assert took.reserve_s > 0
    assert took.register_s > 0


def test_an_error_is_that_of_who_waits() -> None:
    """It is raised where the memory is needed."""
    from kvshare.vllm_connector.worker.host_memory import taken

    def register(_: torch.Tensor) -> None:
        raise RuntimeError("no such device")

    device, _ = noting(register)
    with taken(mapped(MIB), device) as memory, pytest.raises(RuntimeError, match="no such device"):  # type: ignore[arg-type]  # a Device
        memory.result()
