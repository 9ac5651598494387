"""What ranks do together before the first request: check the host's memory, and take the right GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
    monkeypatch.setattr(device, "CudaDevice", lambda own: own)
    assert str(device.device_of_this_worker()) == "cuda:3"
