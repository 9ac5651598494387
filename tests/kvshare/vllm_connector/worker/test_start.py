"""The start of a worker: its memory is taken next to the self-test, and needed by the part that copies."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from kvshare.vllm_connector.worker.copy_test import CopyTest
    from kvshare.vllm_connector.worker.self_test import SelfTest
    from kvshare.vllm_connector.worker.worker import ConnectorWorker
    from tests.kvshare.vllm_connector.in_process_vllm import Vllm

WAIT_S = 0.2


def started(vllm: Vllm, device: Any) -> ConnectorWorker:
    """Another worker over the model and the blocks of a vLLM."""
    from kvshare.vllm_connector.worker.models import Models
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

    given = vllm.worker._start
    worker = ConnectorWorker(given.config, given.settings, given.spec, given.layer_names, device)
    worker.attach_model(Models(vllm.core.model_executor.driver_worker.model_runner.get_model()))
    worker.close()
    assert worker.handshake is not None
    return worker


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the self-test has begun."""
    from kvshare.vllm_connector.worker.copy_test import CopyTest
    from kvshare.vllm_connector.worker.self_test import SelfTest

    found: list[str] = []
    check_listening, check_copies = SelfTest.check_listening, CopyTest.check

    def listening(test: SelfTest) -> str | None:
        found.append("listening")
        return check_listening(test)

    def copying(test: CopyTest) -> str | None:
        found.append("copies")
        return check_copies(test)

    monkeypatch.setattr(SelfTest, "check_listening", listening)
    monkeypatch.setattr(CopyTest, "check", copying)
    return found


def test_memory_is_taken_while_the_model_is_tested(
    vllm: Vllm, events: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Copies wait for it. The log says how long it took."""
    from kvshare.vllm_connector.worker import start as starting
    from kvshare.vllm_connector.worker.device import Device

    class SlowDevice(Device):
        def register(self, buffer: torch.Tensor) -> None:
            until = time.monotonic() + 60
            while "listening" not in events and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(WAIT_S)  # until the self-test has ended, but for its copies
            events.append(f"{buffer.nbytes} bytes on {threading.current_thread().name}")

    monkeypatch.setattr(starting, "log", logging.getLogger("here"))  # vLLM takes handlers off its own
    with caplog.at_level(logging.INFO, logger="here"):
        worker = started(vllm, SlowDevice())
    assert worker.handshake is not None
    assert worker.handshake.unsupported == ()
    num_bytes = worker.attached.store.arena.buffer.nbytes
    assert events == ["listening", f"{num_bytes} bytes on kvshare-memory_0", "copies"]
    (line,) = (record.getMessage() for record in caplog.records if record.name == "here")
    number = r"(\d+\.\d)"
    numbers = [f"took {number} s", f"{number} GiB", f"reserved in {number} s", f"registered in {number} s"]
    found = re.search(".*".join(numbers), line)
    assert found is not None
    assert float(found[1]) >= float(found[4]) >= WAIT_S
    assert found[2] == f"{num_bytes / 2**30:.1f}"


def test_memory_that_cannot_be_taken_stops_nothing(vllm: Vllm, events: list[str]) -> None:
    """The worker says why, and vLLM serves without sharing."""
    from kvshare.vllm_connector.worker.device import Device

    class NoDevice(Device):
        def register(self, buffer: torch.Tensor) -> None:
            raise MemoryError("not so much")

    handshake = started(vllm, NoDevice()).handshake
    assert handshake is not None
    assert handshake.unsupported == ("the self-test raised an error: MemoryError: not so much",)
    assert "copies" not in events


def test_memory_that_the_system_refuses_is_given_back(
    vllm: Vllm, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host has too little as it is. The reason is what the operator can do."""
    from kvshare.vllm_connector.worker import host_memory
    from kvshare.vllm_connector.worker.device import Device

    def refuse(address: int, num_bytes: int) -> None:
        raise host_memory.PagesRefusedError("--kv-bytes takes too much: lower it")

    monkeypatch.setattr(host_memory, "reserve", refuse)
    worker = started(vllm, Device())
    assert worker.handshake is not None
    assert worker.handshake.unsupported == ("--kv-bytes takes too much: lower it",)
    assert worker._attached is None
    assert "copies" not in events


def test_ranks_take_their_memory_before_they_compute(
    vllm: Vllm, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass of several ranks must not wait for the registration of one."""
    from kvshare.vllm_connector.worker import start as starting
    from kvshare.vllm_connector.worker.device import Device

    class SlowDevice(Device):
        def register(self, buffer: torch.Tensor) -> None:
            time.sleep(WAIT_S)
            events.append("registered")

    monkeypatch.setattr(starting, "num_ranks", lambda: 2)
    started(vllm, SlowDevice())
    assert events == ["registered", "listening", "copies"]


def test_a_worker_that_cannot_even_look_refuses(vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend whose metadata cannot be built does not keep vLLM from starting."""
    import torch

    from kvshare.vllm_connector.worker import start as starting
    from kvshare.vllm_connector.worker.models import Models
    from kvshare.vllm_connector.worker.worker import ConnectorWorker

    def fail(*_: object, **given: object) -> None:
        raise RuntimeError("no such backend")

    given = vllm.worker._start
    monkeypatch.setattr(starting, "PartialForward", fail)
    fresh = ConnectorWorker(given.config, given.settings, given.spec, given.layer_names)
    fresh.attach_model(Models(torch.nn.Module()))  # it does not come to that
    assert fresh.handshake is not None
    assert "no such backend" in fresh.handshake.unsupported[0]
