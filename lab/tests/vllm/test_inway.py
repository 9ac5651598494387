"""How `kvshare bench inway` keeps to its time."""

from __future__ import annotations

import pytest

from kvshare_lab.vllm import inway


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(inway, "time", clock)
    return clock


def test_what_would_end_too_late_is_left_out(clock: Clock) -> None:
    """By what it took the last time; what was never done is tried while there is time."""
    budget = inway.Budget(100.0)
    with budget.timed("long"):
        clock.now += 20
    assert budget.allows("long", 0.5)
    clock.now += 11
    assert not budget.allows("long", 0.5)
    assert budget.allows("short", 0.5)
    clock.now += 20
    assert not budget.allows("mix", 0.5, left_out="mix 10%")
    assert budget.allows("mix", 1.0)
    assert budget.left_out == {"long": 1, "mix 10%": 1}


def test_without_a_limit_nothing_is_left_out(clock: Clock) -> None:
    """However long it takes."""
    budget = inway.Budget(None)
    clock.now += 1e6
    assert budget.allows("long", 0.1)
    assert not budget.left_out
