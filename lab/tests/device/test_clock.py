"""Virtual time, in which actors take turns."""

from __future__ import annotations

from types import ModuleType

import pytest

from kvshare_lab.device.clock import Clock, Event, StandstillError
from kvshare_lab.device.gpu import SimulatedGpu
from kvshare_lab.device.profile import read_profile
from kvshare_lab.device.threads import in_virtual_time


def test_actors_run_in_the_order_of_their_times() -> None:
    """Whoever started first: what an actor does at 2 s is done before another one's second second is over."""
    clock, seen = Clock(), []

    def work(name: str, step_s: float) -> None:
        for _ in range(3):
            clock.sleep_until(clock.now() + step_s)
            seen.append((name, clock.now()))

    clock.start("slow", lambda: work("slow", 3.0))
    clock.start("quick", lambda: work("quick", 2.0))
    clock.sleep_until(10.0)
    assert seen == [("quick", 2), ("slow", 3), ("quick", 4), ("quick", 6), ("slow", 6), ("slow", 9)]


def test_an_event_is_set_at_a_time() -> None:
    """Who looks earlier does not see it, who waits goes on then."""
    clock = Clock()
    event = Event(clock)

    def work() -> None:
        clock.spend(5.0)
        event.set()

    clock.start("setter", work)
    assert not event.is_set()
    assert not event.wait(timeout=2.0)
    assert clock.now() == 2.0
    assert event.wait()
    assert clock.now() == 5.0


def test_a_condition_wakes_those_that_wait() -> None:
    """At the time of who notifies; a module's thread runs as an actor."""
    clock = Clock()
    gpu, seen = SimulatedGpu(read_profile("h100").costs, clock), []
    module = ModuleType("copies")
    module.threading = None  # type: ignore[attr-defined]  # a module has what it imports
    with in_virtual_time(gpu, {module: ("threading",)}):
        condition = module.threading.Condition()

        def work() -> None:
            with condition:
                condition.wait()
            seen.append(clock.now())

        module.threading.Thread(target=work, name="waiting", daemon=True).start()
        clock.sleep_until(3.0)
        condition.notify()
        clock.sleep_until(4.0)
    assert seen == [3.0]
    assert module.threading is None


def test_who_waits_for_nobody_is_told() -> None:
    """An event that nobody sets ends the simulation, with the names of those that wait."""
    clock = Clock()

    def work() -> None:
        Event(clock).wait()

    clock.start("other", work)
    with pytest.raises(StandstillError, match="main, other"):
        Event(clock).wait()


def test_an_error_of_an_actor_ends_the_simulation() -> None:
    """It is raised in the first actor."""

    def fail() -> None:
        raise ValueError("broken")

    clock = Clock()
    clock.start("other", fail)
    with pytest.raises(ValueError, match="broken"):
        clock.sleep_until(1.0)
