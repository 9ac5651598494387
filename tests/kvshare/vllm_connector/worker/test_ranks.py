"""What ranks do together: check the host's memory, take the right GPU, and agree without waiting."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from tests.kvshare.vllm_connector.worker.small_worker import one_rank

if TYPE_CHECKING:
    import torch

GIB = 2**30


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Host and available bytes of each rank: the test adds them."""
    import torch

    from kvshare.vllm_connector.worker import ranks

    found: list[tuple[str, int]] = []

    def gather(into: list[Any], _: object, group: object) -> None:
        into[:] = found

    class Group:
        rank_in_group, cpu_group = 0, None

        @property
        def world_size(self) -> int:
            return len(found)

    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=found[0][1]))
    monkeypatch.setattr(ranks, "get_tp_group", Group)
    monkeypatch.setattr(ranks, "psutil", memory)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    return found


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([("a", 9 * GIB)], None),
        ([("a", 7 * GIB)], "takes 8.0 GiB of host memory, 7.0 GiB are available: lower it"),
        # Each rank's part is 4 GiB, of which there is enough for one.
        ([("a", 7 * GIB), ("a", 6 * GIB)], "takes 8.0 GiB of host memory, 6.0 GiB are available: lower it"),
        ([("a", 5 * GIB), ("b", 5 * GIB)], None),
        ([("a", 5 * GIB), ("b", 3 * GIB)], "takes 4.0 GiB of host memory, 3.0 GiB are available: lower it"),
    ],
)
def test_memory_of_all_ranks_of_a_host_is_compared_with_what_it_has(
    hosts: list[tuple[str, int]], found: list[tuple[str, int]], problem: str | None
) -> None:
    """All ranks say the same, so that the refusal is one line."""
    from kvshare.vllm_connector.worker.ranks import check_host_memory

    hosts += found
    if problem is None:
        check_host_memory(8 * GIB)
        return
    with pytest.raises(MemoryError, match=problem):
        check_host_memory(8 * GIB)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_memory_is_taken_that_the_host_does_not_have(
    hosts: list[tuple[str, int]], num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither shared nor a rank's own: the kernel would end vLLM."""
    import torch

    from kvshare.vllm_connector.worker import ranks
    from tests.kvshare.vllm_connector.worker.small_worker import new_worker

    hosts += [("a", 3 * GIB)] * num_ranks  # nine eighths of 4 GiB are wanted
    worker, taken = new_worker(1), list[object]()
    worker._start.config.kv_transfer_config = SimpleNamespace(engine_id="e")
    monkeypatch.setattr(ranks, "_mapped", lambda *given, creates: taken.append(given))
    monkeypatch.setattr(torch, "empty", lambda *given, **_: taken.append(given))
    with pytest.raises(MemoryError, match=r"takes 4\.5 GiB"):
        worker._start._allocate(worker.attached.cache.kv_layout)
    assert not taken


def test_copies_are_made_on_the_gpu_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread starts with GPU 0, and "cuda" without a number is whichever it has."""
    import torch

    from kvshare.vllm_connector.worker import device

    monkeypatch.setattr(device, "current_platform", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(device, "CudaGpu", lambda own: own)
    monkeypatch.setattr(device, "GpuDevice", lambda gpu: gpu)
    assert str(device.device_of_this_worker()) == "cuda:3"


SAID = [  # in each step: what each rank says, and what both know then
    ({"a": True, "b": False}, {"a": False, "b": True}, []),
    ({"a": True, "b": True}, {"a": True, "b": False}, ["a"]),
    ({"b": True, "c": True}, {"b": True, "c": False}, ["b"]),
    ({}, {}, []),
    ({"c": True}, {"c": True}, ["c"]),
]


def added(values: torch.Tensor, group: Any) -> torch.Tensor:
    """What a communicator makes of the ranks' values."""
    import torch

    total = values.clone()
    torch.distributed.all_reduce(total, group=group)
    return total


def on_two_ranks(
    folder: Path, work: Callable[[int], Any], all_reduce: Callable[[torch.Tensor, Any], torch.Tensor] = added
) -> list[Any]:
    """What `work` returns on each of two processes that are ranks of one group."""
    import torch
    from torch._C._distributed_c10d import FileStore

    context = multiprocessing.get_context("fork")  # a new one would import vLLM for seconds
    answers = [context.Queue(), context.Queue()]

    def run(rank: int) -> None:
        # Not torch's default group, which this process has if a vLLM was started in it before.
        store = FileStore(str(folder / "store"), 2)
        own = torch.distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=300))
        group = SimpleNamespace(
            world_size=2, rank_in_group=rank, cpu_group=own, all_reduce=lambda values: all_reduce(values, own)
        )
        with patch("kvshare.vllm_connector.worker.ranks.get_tp_group", lambda: group):
            answers[rank].put(work(rank))

    processes = [context.Process(target=run, args=(rank,), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(300)
        assert [process.exitcode for process in processes] == [0, 0]
        return [answer.get(timeout=60) for answer in answers]
    finally:
        for process in processes:
            process.kill()


def test_what_all_ranks_say_is_known_in_the_same_step(tmp_path: Path) -> None:
    """The same on both, whatever each says; a step in which they say nothing has no result."""
    from kvshare.vllm_connector.worker.ranks import Agreement

    def work(rank: int) -> list[list[str]]:
        agreement, known = Agreement[str](), []
        for step in SAID:
            agreement.say(step[rank])  # type: ignore[arg-type]
            known.append(agreement.known())
        return known

    assert on_two_ranks(tmp_path, work) == [[known for _, _, known in SAID]] * 2


def test_who_says_something_waits_for_no_other_rank(tmp_path: Path) -> None:
    """The second rank says it when the first one has begun its forward pass."""
    from kvshare.vllm_connector.worker.ranks import Agreement

    first_has_said = multiprocessing.get_context("fork").Event()

    def work(rank: int) -> list[str]:
        agreement = Agreement[str]()
        if rank == 1:
            assert first_has_said.wait(300)
        agreement.say({"a": True})
        first_has_said.set()
        return agreement.known()

    assert on_two_ranks(tmp_path, work) == [["a"], ["a"]]


def test_a_single_rank_asks_nobody() -> None:
    """What is true there is known."""
    from kvshare.vllm_connector.worker.ranks import Agreement

    with one_rank():
        agreement = Agreement[str]()
        agreement.say({"a": True, "b": False})
        assert agreement.known() == ["a"]


def test_sums_have_the_same_bits_on_all_ranks(tmp_path: Path) -> None:
    """Also of a communicator that rounds otherwise on each rank, as adding zero never rounds."""
    import torch

    from kvshare.vllm_connector.worker.ranks import rank, summed

    def all_reduce(values: torch.Tensor, group: Any) -> torch.Tensor:
        own = torch.zeros(2, *values.shape)
        own[rank()] = values
        both = added(own, group)
        total = both[0] + both[1]
        rounds_up = (both[0] != 0) & (both[1] != 0) & (rank() == 1)
        return torch.where(rounds_up, torch.nextafter(total, torch.ones_like(total)), total)

    def work(rank: int) -> list[float]:
        return list(summed(torch.tensor([0.1, 0.3 * rank])).tolist())

    first, second = on_two_ranks(tmp_path, work, all_reduce)
    assert first == second == pytest.approx([0.1 * 2, 0.3])
