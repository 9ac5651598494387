"""Batched copies, with a function in the driver's place that copies host memory."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvshare.vllm_connector.worker.batched_copy import (
    BATCH_FUNCTION,
    BatchFunction,
    copy_all,
    find_batch_function,
)

STREAM = 77
FAR = ctypes.c_size_t(-1).value


@dataclass
class CopyingDriver:
    """Copies what is asked for, and records it. `error`: its answer instead, for the copy `failed`."""

    error: int = 0
    failed: int = FAR
    sizes: list[int] = field(default_factory=list)
    order: int | None = None
    stream: int | None = None

    def __post_init__(self) -> None:
        self.function: BatchFunction = BATCH_FUNCTION(self._copy)

    def _copy(
        self, targets: int, sources: int, sizes: int, count: int,
        attributes: Any, first: Any, num_attributes: int, failed: Any, stream: int,
    ) -> int:  # fmt: skip
        assert num_attributes == 1
        assert first[0] == 0
        self.order, self.stream = attributes[0].source_access_order, stream
        failed[0] = self.failed
        arrays = [(ctypes.c_size_t * count).from_address(at) for at in (targets, sources, sizes)]
        for target, source, size in zip(*arrays, strict=True):
            if not self.error:
                ctypes.memmove(target, source, size)
            self.sizes.append(size)
        return self.error


@pytest.fixture
def driver() -> CopyingDriver:
    return CopyingDriver()


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64).to(torch.uint8)


RUNS = [  # target, source, bytes
    *((10, 40, 5), (15, 45, 1), (16, 46, 4)),  # one after the other in both buffers
    (20, 10, 3),  # in the target only
    (3, 3, 0),
    (0, 13, 2),  # in the source only
    (60, 60, 40),
]
SIZES = [10, 3, 2, 40]


def copy_runs(function: BatchFunction | None, target: torch.Tensor, source: torch.Tensor) -> None:
    copy_all(
        function,
        [target[to : to + size] for to, _, size in RUNS],
        [source[start : start + size] for _, start, size in RUNS],
        stream=STREAM,
        is_stable=True,
    )


@pytest.mark.parametrize("is_batched", [True, False], ids=["batched", "one by one"])
def test_every_run_arrives_and_nothing_else_changes(driver: CopyingDriver, is_batched: bool) -> None:
    """With the driver's function and without."""
    target, source = torch.full((100,), 255, dtype=torch.uint8), numbers(100)
    want = target.clone()
    for to, start, size in RUNS:
        want[to : to + size] = source[start : start + size]
    copy_runs(driver.function if is_batched else None, target, source)
    assert torch.equal(target, want)


def test_runs_that_follow_each_other_are_one_copy(driver: CopyingDriver) -> None:
    """Only where they do so in both buffers; empty ones are none."""
    copy_runs(driver.function, numbers(100), numbers(100))
    assert driver.sizes == SIZES


def test_rows_of_any_shape_and_type_are_copied_whole(driver: CopyingDriver) -> None:
    """Sizes are in bytes."""
    sources = [torch.randn(2, 3, 4).to(dtype) for dtype in (torch.bfloat16, torch.float32)]
    targets = [torch.zeros_like(source) for source in sources]
    copy_all(driver.function, targets, sources, stream=STREAM, is_stable=True)
    assert all(map(torch.equal, targets, sources))
    assert driver.sizes == [48, 96]


@pytest.mark.parametrize(("is_stable", "order"), [(True, 3), (False, 1)])
def test_a_source_is_read_early_only_if_it_is_stable(
    driver: CopyingDriver, is_stable: bool, order: int
) -> None:
    """The numbers are CUmemcpySrcAccessOrder's ANY and STREAM; the copies go to the given stream."""
    copy_all(driver.function, [numbers(8)], [numbers(8)], stream=STREAM, is_stable=is_stable)
    assert (driver.order, driver.stream) == (order, STREAM)


@pytest.mark.parametrize("tensors", [[], [torch.empty(0)]], ids=["none", "empty"])
def test_nothing_to_copy_is_no_call(driver: CopyingDriver, tensors: list[torch.Tensor]) -> None:
    """The driver refuses a batch of no copies."""
    copy_all(driver.function, tensors, tensors, stream=STREAM, is_stable=True)
    assert driver.stream is None


@pytest.mark.parametrize(
    ("failed", "message"),
    [
        (1, "CUDA error 719 for 4 copies, copy 1 of 3 bytes"),
        (FAR, "CUDA error 719 for 4 copies$"),
    ],
)
def test_an_error_says_which_copy(failed: int, message: str) -> None:
    """Where the driver knows it."""
    driver = CopyingDriver(error=719, failed=failed)
    with pytest.raises(RuntimeError, match=message):
        copy_runs(driver.function, numbers(100), numbers(100))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.zeros(7, dtype=torch.uint8), r"uint8 \(7,\) to torch.uint8 \(8,\)"),
        (torch.zeros(8, dtype=torch.int8), "int8"),
        (torch.zeros(16, dtype=torch.uint8)[::2], r"strides \(2,\) and \(1,\)"),
    ],
)
@pytest.mark.parametrize("is_batched", [True, False])
def test_a_source_of_another_form_is_refused(
    driver: CopyingDriver, wrong: torch.Tensor, message: str, is_batched: bool
) -> None:
    """Before anything is copied: the driver would copy bytes that are not the tensor's."""
    target, function = numbers(8), driver.function if is_batched else None
    with pytest.raises(ValueError, match=message):
        copy_all(function, [target, numbers(8)], [numbers(8) + 1, wrong], stream=STREAM, is_stable=True)
    assert torch.equal(target, numbers(8))


def test_the_default_stream_is_refused(driver: CopyingDriver) -> None:
    """The driver does not take it."""
    with pytest.raises(ValueError, match="default stream"):
        copy_all(driver.function, [numbers(8)], [numbers(8)], stream=0, is_stable=True)


class TestFinding:
    """The function in the driver's library."""

    def library(self, *, error: int = 0, address: int = 0) -> Any:
        asked: list[tuple[bytes, int]] = []

        def find(symbol: bytes, into: Any, version: Any, flags: Any, found: Any) -> int:
            asked.append((symbol, version.value))
            assert flags.value == 0
            into._obj.value = address
            return error

        return SimpleNamespace(cuGetProcAddress_v2=find, asked=asked)

    def test_it_is_called_at_its_address(self, driver: CopyingDriver) -> None:
        """By the ABI of CUDA 12.8."""
        library = self.library(address=ctypes.cast(driver.function, ctypes.c_void_p).value)  # type: ignore[arg-type]
        function = find_batch_function(library)
        assert library.asked == [(b"cuMemcpyBatchAsync", 12080)]
        target = torch.zeros(8, dtype=torch.uint8)
        copy_all(function, [target], [numbers(8)], stream=STREAM, is_stable=True)
        assert target.tolist() == list(range(8))

    def test_an_older_driver_has_none(self) -> None:
        """It finds no such symbol, or cannot be asked at all."""
        assert find_batch_function(self.library(error=500)) is None
        assert find_batch_function(self.library()) is None
        assert find_batch_function(SimpleNamespace()) is None

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
    def test_without_a_driver_there_is_none(self) -> None:
        """Copies are torch's."""
        assert find_batch_function() is None
