"""
The threads and the clock of a module, in virtual time: actors take the place of its threads. A lock needs
none, as one actor runs at a time and gives way only where it waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, Self
from unittest.mock import patch

from kvshare_lab.device.clock import Event
from kvshare_lab.device.gpu import SimulatedGpu


class Condition:
    """A stand-in for `threading.Condition`."""

    def __init__(self, gpu: SimulatedGpu) -> None:
        self._clock = gpu.clock
        self._changed = Event(self._clock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """There is no lock."""

    def notify(self) -> None:
        before, self._changed = self._changed, Event(self._clock)
        before.set()

    def wait(self) -> None:
        self._changed.wait()


class Thread:
    """A stand-in for `threading.Thread`, whose work is charged like that of every actor."""

    def __init__(self, gpu: SimulatedGpu, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._gpu, self._target, self._name = gpu, target, name

    def start(self) -> None:
        self._gpu.clock.start(self._name, self._run)

    def join(self, timeout: float | None = None) -> None:
        """It ends with the simulation."""

    def _run(self) -> None:
        with self._gpu:
            self._target()


@contextmanager
def in_virtual_time(gpu: SimulatedGpu, modules: dict[ModuleType, tuple[str, ...]]) -> Iterator[None]:
    """Give these modules other `threading` and `time`, as far as they are named."""
    clock = gpu.clock
    own: dict[str, Any] = {
        "threading": SimpleNamespace(
            Condition=lambda: Condition(gpu),
            Event=lambda: Event(clock),
            Thread=lambda **options: Thread(gpu, **options),
            get_native_id=lambda: 0,
        ),
        "time": SimpleNamespace(
            perf_counter=clock.now,
            monotonic=clock.now,
            sleep=lambda seconds: clock.sleep_until(clock.now() + seconds),
        ),
    }
    with ExitStack() as patched:
        for module, names in modules.items():
            for name in names:
                patched.enter_context(patch.object(module, name, own[name]))
        yield
