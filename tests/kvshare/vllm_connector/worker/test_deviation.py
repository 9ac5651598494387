"""The self-test's measure: what it finds, and that a GPU computes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


def deviation(right: torch.Tensor, found: torch.Tensor, tolerance: float = 0.08) -> float:
    from kvshare.kv.sequence import SegmentKV
    from kvshare.vllm_connector.worker.deviation import Expected

    expected = Expected(SegmentKV((right,)), tolerance=tolerance, device=right.device)
    return expected.deviation(SegmentKV((found,)))


def random_rows(*shape: int, seed: int = 0) -> torch.Tensor:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("wrong", "limit"), [("nothing", 0.01), ("a head", 1.0), ("a token", 1.0), ("rounding", 0.08)]
)
def test_the_measure_sees_small_channels_beside_large_ones(wrong: str, limit: float) -> None:
    rows = random_rows(2, 300, 2, 16)
    rows[..., 3] = 300 + 0.01 * rows[..., 3]
    rows = rows.bfloat16()
    found = {
        "nothing": rows,
        "a head": rows.roll(1, dims=2),
        "a token": rows.roll(1, dims=1),
        "rounding": (rows.float() * 1.001).bfloat16(),
    }[wrong]
    error = deviation(rows, found)
    assert error <= limit if limit < 0.1 else error >= limit


@pytest.mark.parametrize("plane", [0, 1])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_channel_of_one_layer_is_enough(plane: int, layer: int) -> None:
    """The worst one counts, in whichever plane."""
    from kvshare.kv.sequence import SegmentKV
    from kvshare.vllm_connector.worker.deviation import Expected

    planes = [random_rows(3, 40, 2, 8, seed=seed) for seed in range(2)]
    expected = Expected(SegmentKV(tuple(planes)), tolerance=0.002, device=planes[0].device)
    assert expected.deviation(SegmentKV(tuple(planes))) == 0
    planes[plane] = planes[plane].clone()
    planes[plane][layer, :, 1, 5] += 0.5
    assert 0.3 < expected.deviation(SegmentKV(tuple(planes))) < 0.8


def test_each_layer_has_its_own_scale() -> None:
    """A layer of small rows is not hidden by one of large rows."""
    rows = random_rows(2, 100, 2, 8)
    rows[0] *= 1000
    found = rows.clone()
    found[1] += 0.3
    assert 0.2 < deviation(rows, found) < 0.5


@pytest.mark.parametrize("where", ["expected", "found"])
def test_what_is_not_a_number_is_not_small(where: str) -> None:
    """Neither is it lost among other layers' errors."""
    rows, damaged = random_rows(3, 20, 2, 4), random_rows(3, 20, 2, 4)
    damaged[1, 3, 0, 2] = float("nan")
    both = (damaged, rows) if where == "expected" else (rows, damaged)
    assert not deviation(*both) <= 1e9


def test_a_gpu_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer at a time goes there, as there is no room for all; one number comes back."""
    import torch

    from kvshare.kv.sequence import SegmentKV
    from kvshare.vllm_connector.worker.deviation import Expected
    from tests.kvshare.vllm_connector.worker.pretended_gpu import CUDA, Gpu

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    rows, found = (
        SegmentKV((random_rows(3, 40, 2, 8, seed=seed), random_rows(3, 40, 2, 8, seed=seed + 1)))
        for seed in (0, 2)
    )
    here = Expected(rows, tolerance=0.08, device=torch.device("cpu")).deviation(found)
    with Gpu() as gpu:
        there = Expected(rows, tolerance=0.08, device=CUDA).deviation(found)
    assert there == here
    assert set(gpu.seen.up) == {40 * 2 * 8 * 4}
    assert not gpu.seen.down
    assert [name for name in gpu.seen.waits if name != "_to_copy"] == ["_local_scalar_dense"]
