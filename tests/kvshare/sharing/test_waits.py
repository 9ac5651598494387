"""By how much shared prompts wait longer than full ones, as far as that was seen."""

from __future__ import annotations

import pytest

from kvshare.sharing.waits import Waits

QUEUES = (0.0, 0.2, 0.4, 0.8, 1.0, 0.6, 0.1, 0.5)


class Clock:
    """Set by the test."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def seen(*, longer: float, clock: Clock | None = None) -> Waits:
    """Full prompts wait for the queue, shared ones for so many times as much more."""
    waits = Waits(clock=clock or Clock())
    for queue_s in QUEUES:
        waits.observe(shared=False, queue_s=queue_s, seconds=queue_s)
        waits.observe(shared=True, queue_s=queue_s, seconds=(1 + longer) * queue_s)
    return waits


@pytest.mark.parametrize("queue_s", [0.3, 1.0, 2.0])
def test_the_excess_follows_the_queue(queue_s: float) -> None:
    """Also behind a queue that is longer than any that was seen."""
    assert seen(longer=0.5).excess_s(queue_s) == pytest.approx(0.5 * queue_s, rel=0.35)


@pytest.mark.parametrize(
    ("longer", "queue_s"),
    [
        (0.0, 1.0),  # both wait as long
        (-0.5, 1.0),  # shared prompts wait less
        (0.5, 0.0),  # an idle replica
    ],
)
def test_there_is_no_excess(longer: float, queue_s: float) -> None:
    """Where nothing is waited for longer."""
    assert seen(longer=longer).excess_s(queue_s) == pytest.approx(0.0, abs=1e-3)


def test_few_waits_say_nothing() -> None:
    """One prompt may have come at a bad moment."""
    waits = Waits()
    for shared in (True, False) * 3:
        waits.observe(shared=shared, queue_s=1.0, seconds=5.0 if shared else 1.0)
    assert waits.excess_s(1.0) == 0.0


def test_waits_at_another_load_are_forgotten() -> None:
    """What was refused then is tried again."""
    clock = Clock()
    waits = seen(longer=0.5, clock=clock)
    clock.now = 60.0
    assert waits.excess_s(1.0) > 0.3
    clock.now = 600.0
    assert waits.excess_s(1.0) == 0.0
