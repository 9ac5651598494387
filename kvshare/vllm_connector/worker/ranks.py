"""
Agreement between the ranks of tensor parallelism, and the host memory that they share.

A forward pass contains collectives: all ranks run it, or none.

    before a pass   `agreed`, `on_all_ranks`: the ranks find what succeeded on all of them
    in a step       `Agreement`: what has happened on all ranks, without a wait
    in a pass       `as_one`: if one rank fails, the others wait inside a collective and cannot be reached. So
                    its process ends, and vLLM, which monitors it, ends the others.
                    `summed`: sums over ranks, in the order of work on the device
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

import psutil
import torch
from vllm.distributed.parallel_state import get_tp_group

from kvshare.safe_logging import classes_and_places

log = logging.getLogger("vllm.kvshare")

_FOLDER = Path("/dev/shm")
_T = TypeVar("_T")
_K = TypeVar("_K", bound=Hashable)


class RankFailed(SystemExit):
    """Ends a worker process. vLLM would take any other exception as an answer, and wait for other ranks."""


def num_ranks() -> int:
    return int(get_tp_group().world_size)


def rank() -> int:
    return int(get_tp_group().rank_in_group)


def agreed(values: Sequence[bool]) -> list[bool]:
    """Return the elementwise AND over all ranks."""
    group = get_tp_group()
    if group.world_size == 1 or not values:
        return list(values)
    tensor = torch.tensor(values, dtype=torch.int32)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return [bool(value) for value in tensor.tolist()]


class Agreement(Generic[_K]):
    """
    Finds what is true on all ranks. Ranks call `say` before a forward pass and `known` after it: values are
    exchanged while the pass is launched, so that no rank waits for another one.

        before      rank 0  say({a: True, b: True})     rank 1  say({a: True, b: False})
        after               known() -> [a]                      known() -> [a]

    All ranks call both in the same steps, with the same keys in the same order; keys do not leave the rank.
    """

    def __init__(self) -> None:
        self._keys: list[_K] = []
        self._values = torch.zeros(0, dtype=torch.int32)
        self._under_way: Any = None  # torch's handle of the all-reduce

    def say(self, values: Mapping[_K, bool]) -> None:
        """Say what is true here, and begin to combine it with the other ranks."""
        self._arrive()
        self._keys = list(values)
        self._values = torch.tensor(list(values.values()), dtype=torch.int32)
        group = get_tp_group()
        if self._keys and group.world_size > 1:
            self._under_way = torch.distributed.all_reduce(
                self._values, torch.distributed.ReduceOp.MIN, group=group.cpu_group, async_op=True
            )

    def known(self) -> list[_K]:
        """Return what was said to be true on all ranks."""
        self._arrive()
        return [key for key, value in zip(self._keys, self._values.tolist(), strict=True) if value]

    def _arrive(self) -> None:
        if self._under_way is not None:
            self._under_way.wait()
            self._under_way = None


def summed(values: torch.Tensor) -> torch.Tensor:
    """
    Return the sum over all ranks, with the same bits on each, in the order of work on the device.

    If sums were rounded differently, ranks would choose different tokens. So all ranks use the sum of rank 0,
    whatever algorithm the communicator has: a second all-reduce adds zeros to it.
    """
    group = get_tp_group()
    if group.world_size == 1:
        return values
    total: torch.Tensor = group.all_reduce(values)
    first: torch.Tensor = group.all_reduce(total if rank() == 0 else torch.zeros_like(total))
    return first


def on_all_ranks(work: Callable[[], _T], problem: str) -> _T:
    """Do `work`, which must not contain a collective. Raises on every rank if it fails on one."""
    is_done = False
    try:
        with torch.inference_mode():
            result = work()
        is_done = True
    finally:
        is_done_everywhere = all(agreed([is_done]))
    if not is_done_everywhere:
        raise RuntimeError(problem)
    return result


@contextmanager
def as_one(what: str) -> Iterator[None]:
    """Run code with collectives: an error in it ends the process, unless there is a single rank."""
    try:
        yield
    except Exception as exc:
        if num_ranks() == 1:
            raise
        log.critical(
            "kvshare: rank %d failed in %s, which all ranks run together; it ends, and vLLM with it. "
            "Start vLLM again, and report this: %s",
            rank(),
            what,
            classes_and_places(exc),
        )
        raise RankFailed(1) from exc


def shared_memory(num_bytes: int, name: str) -> torch.Tensor | None:
    """
    Reserve memory that all ranks share: each writes its own heads of a segment there, so that stored bytes do
    not depend on the number of ranks, and one reader can read whole segments.

    All ranks call it together. `name` is unique to the engine.
    Returns:  None if there is a single rank, or the memory cannot be reserved
    """
    if num_ranks() == 1:
        return None
    path, buffer = _FOLDER / f"kvshare-{name}", None
    if rank() == 0:
        buffer = _mapped(path, num_bytes, creates=True)
    has_first = all(agreed([rank() != 0 or buffer is not None]))
    if has_first and rank() != 0:
        buffer = _mapped(path, num_bytes, creates=False)
    have_all = all(agreed([buffer is not None]))
    if rank() == 0:
        path.unlink(missing_ok=True)
    return buffer if have_all else None


def check_host_memory(num_bytes: int) -> None:
    """
    Raise the same MemoryError on all ranks if a host has less memory available than its ranks will take.

    `num_bytes`: what all ranks take together. All ranks call it together, before they take it.
    """
    group = get_tp_group()
    memory = [(platform.node(), psutil.virtual_memory().available)] * group.world_size  # by rank
    if group.world_size > 1:
        torch.distributed.all_gather_object(memory, memory[0], group=group.cpu_group)
    for host, count in Counter(host for host, _ in memory).items():
        wanted = num_bytes * count / len(memory) / 2**30
        available = min(num_free for other, num_free in memory if other == host) / 2**30
        if wanted > available:
            raise MemoryError(
                f"--kv-bytes takes {wanted:.1f} GiB of host memory, {available:.1f} GiB are available: "
                "lower it"
            )


def _mapped(path: Path, num_bytes: int, *, creates: bool) -> torch.Tensor | None:
    flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if creates else 0)
    try:
        descriptor = os.open(path, flags, 0o600)
        try:
            if creates:
                # Reserved now: running out of memory at a later write would end the process.
                os.posix_fallocate(descriptor, 0, num_bytes)
            return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
        finally:
            os.close(descriptor)
    except OSError as exc:
        log.warning(
            "kvshare: %d bytes of shared memory cannot be reserved (%s): each rank stores its own part. "
            "Enlarge %s (docker run --shm-size) to share it",
            num_bytes,
            exc.strerror or exc,
            _FOLDER,
        )
        return None
