"""What torch's calls cost on a GPU of which only sizes exist."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kvshare_lab.device.clock import Clock
from kvshare_lab.device.gpu import MAIN, THERE, SimulatedGpu
from kvshare_lab.device.profile import Costs, read_profile

MIB = 2**20


def costs(**own: float) -> Costs:
    """No host time, a byte a nanosecond everywhere."""
    free = {"launch_s": 0.0, "call_s": 0.0, "behind_s": 0.0}
    rates = {"pcie_bytes_per_s": 1e9, "memory_bytes_per_s": 1e9}
    return replace(read_profile("h100").costs, **{**free, **rates, **own})


def test_a_copy_up_costs_its_bytes() -> None:
    """Once, on the way up, and the host does not wait."""
    clock = Clock()
    with SimulatedGpu(costs(), clock) as gpu:
        torch.empty(MIB, dtype=torch.uint8, device=THERE).copy_(torch.empty(MIB, dtype=torch.uint8))
        assert gpu.reached_at() == pytest.approx(MIB * 1e-9)
    assert clock.now() == 0.0
    assert (gpu.work[""].bytes_up, gpu.work[""].launches) == (MIB, 1)


def test_both_ways_at_once_and_each_way_in_turn() -> None:
    """Copies up follow each other although their streams differ; one down and small ones go beside them."""
    with SimulatedGpu(costs(), Clock()) as gpu:
        for name, copy in (("one", gpu.copy_up), ("two", gpu.copy_up), ("three", gpu.copy_down)):
            with gpu.on_stream(name):
                copy(2 * MIB)
        with gpu.on_stream("small"):
            gpu.copy_up(MIB)
        ends = [gpu.reached_at(name) * 1e9 / MIB for name in ("one", "two", "three", "small")]
    assert ends == pytest.approx([2, 4, 2, 1])


def test_selected_rows_cost_what_is_selected() -> None:
    """Read and written; the rows that are not selected cost nothing, and views are free."""
    with SimulatedGpu(costs(), Clock()) as gpu:
        table = torch.empty(1000, 64, device=THERE)
        rows = table.index_select(0, torch.empty(10, dtype=torch.int64, device=THERE))
        rows.view(5, 2, 64).transpose(0, 1)
    assert (gpu.work[""].bytes_moved, gpu.work[""].launches) == (2 * 10 * 64 * 4 + 80, 1)


def test_what_the_host_reads_it_waits_for() -> None:
    """A `.cpu()` ends when all before it on its stream has ended."""
    clock = Clock()
    with SimulatedGpu(costs(), clock) as gpu:
        gpu.launch(2.0)
        read = torch.empty(10, device=THERE).cpu()
    assert not read.is_meta
    assert clock.now() == pytest.approx(2.0)
    assert gpu.work[""].waits == 1


def test_a_kernel_beside_a_forward_pass_waits_for_room() -> None:
    """A kernel of vLLM's own stream does not, nor one that begins when that stream is idle."""
    with SimulatedGpu(costs(behind_s=1.0), Clock()) as gpu:
        with gpu.on_stream("copies"):
            gpu.launch(1.0)
            assert gpu.reached_at() == 1.0
        gpu.launch(10.0)
        assert gpu.reached_at(MAIN) == 10.0
        with gpu.on_stream("copies"):
            gpu.launch(1.0)
            assert gpu.reached_at() == 3.0


def test_work_is_charged_to_a_request() -> None:
    """What the host reads of KV, too."""
    clock = Clock()
    gpu = SimulatedGpu(costs(check_bytes_per_s=1e6), clock)
    with gpu.on_behalf_of("one"):
        gpu.check(MIB)
    gpu.move(MIB)
    assert (gpu.work["one"].bytes_checked, gpu.work["one"].bytes_moved) == (MIB, 0)
    assert clock.now() == pytest.approx(MIB * 1e-6)
