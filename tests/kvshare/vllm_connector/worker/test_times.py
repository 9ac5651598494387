"""Times of stages, also where a device is only sent its work and is past it a step later."""

from __future__ import annotations

import pytest

from kvshare.vllm_connector.worker.cuda import CudaGpu
from kvshare.vllm_connector.worker.device import Device, GpuDevice
from kvshare.vllm_connector.worker.times import Times


class Event:
    """A device's event: its time, once the device is past it."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms
        self.is_past = False

    def query(self) -> bool:
        return self.is_past

    def elapsed_time(self, end: Event) -> float:
        return end.at_ms - self.at_ms


def test_what_the_device_has_not_done_is_not_known_yet() -> None:
    """How long it took to be given the work does not matter; the time comes a step later."""
    device = GpuDevice.__new__(GpuDevice)  # its streams and its staging buffers are not needed
    device._gpu = CudaGpu.__new__(CudaGpu)
    times = Times(device.seconds)
    began, placed, computed = Event(0), Event(30), Event(50)
    times.add("write", began, placed, {"a": 30, "b": 10})
    times.add("pass", placed, computed, {"a": 0, "b": 5})
    assert times.take() == {}
    placed.is_past = True
    assert times.take() == {"a": {"write": pytest.approx(0.0225)}, "b": {"write": pytest.approx(0.0075)}}
    computed.is_past = True
    assert times.take() == {"a": {"pass": 0.0}, "b": {"pass": pytest.approx(0.02)}}
    assert times.take() == {}


def test_on_the_host_all_is_known_at_once() -> None:
    """The same stage of a request adds up."""
    device = Device()
    times = Times(device.seconds)
    for _ in range(2):
        times.add("write", device.mark(), device.mark(), {"a": 3})
    times.add("verify", device.mark(), device.mark(), {"a": 0})
    (found,) = times.take().values()
    assert set(found) == {"write", "verify"}
    assert 0 <= found["write"] < 1
    assert found["verify"] == 0
