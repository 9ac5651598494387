"""Kernels use host addresses only where the driver says that they are the device's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvshare.vllm_connector.worker.host_addresses import has_host_addresses

BUFFER = torch.zeros(100, dtype=torch.uint8)


class Driver:
    """`has`: the attribute of device 3; `first_error` of that call. `moved` is added to each address."""

    def __init__(self, *, has: int = 1, moved: int = 0, error: int = 0, first_error: int = 0) -> None:
        self.has, self.moved, self.error, self.first_error = has, moved, error, first_error
        self.asked: list[int] = []

    def cuDeviceGetAttribute(self, into: Any, name: int, number: int) -> int:
        assert (name, number) == (91, 3)
        into._obj.value = self.has
        return self.first_error

    def cuMemHostGetDevicePointer_v2(self, into: Any, address: Any, flags: int) -> int:
        assert flags == 0
        self.asked.append(address.value)
        into._obj.value = address.value + self.moved
        return self.error


def test_both_ends_of_the_memory_are_asked_for() -> None:
    """It is registered by one call, so what lies between them is the same."""
    driver = Driver()
    assert has_host_addresses(3, BUFFER, driver)
    assert driver.asked == [BUFFER.data_ptr(), BUFFER.data_ptr() + 99]


@pytest.mark.parametrize(
    "driver", [Driver(has=0), Driver(moved=4096), Driver(error=1), Driver(first_error=1), SimpleNamespace()]
)
def test_any_doubt_is_a_no(driver: Any) -> None:
    """The driver copies then."""
    assert not has_host_addresses(3, BUFFER, driver)
