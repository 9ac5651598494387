"""When a pass may begin although its load has not arrived, by how fast earlier passes and loads were."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.paces import Paces

LAYERS = 36
MB = 10**6


def paces(passes: Sequence[tuple[int, float]] = ((100, 0.036),), per_mb_s: float = 1e-3) -> Paces:
    """`passes`: tokens and seconds."""
    from kvshare.vllm_connector.worker.paces import Paces

    made = Paces(lambda began, ended: ended - began)
    for num_tokens, seconds in passes:
        made.note_pass(num_tokens, 0.0, seconds)
    if per_mb_s:
        made.note_load(10 * MB, 10 * per_mb_s)
    return made


def pending(num_mb: float, *, there: float = 0.0) -> list[int]:
    """Of a load of so many megabytes, of which some are there."""
    return [max(0, round(MB * (num_mb * (layer + 1) / LAYERS - there))) for layer in range(LAYERS)]


@pytest.mark.parametrize(
    ("made", "num_mb", "there", "expected"),
    [
        (((100, 0.036),), 20, 20, True),  # everything is there
        (((100, 0.036),), 20, 0, False),  # the first layer is not
        (((100, 0.036),), 20, 1, False),  # the second is there less than 1 ms before its use
        (((100, 0.036),), 20, 2, True),
        (((100, 0.036),), 100, 50, False),
        (((100, 0.036),), 100, 73, True),  # 27 MB at 1.25 ms and 1 ms, in 35 of 36 layers
        (((100, 0.036),), 100, 71.5, False),
        ((), 20, 19, False),  # no pass was measured
        (((50, 0.020), (100, 0.036)), 100, 73, True),
        (((100, 0.040), (100, 0.036)), 100, 73, True),  # the shortest one counts
        (((100, 0.040), (100, 0.030)), 100, 73, False),
        (((100, 0.040), (200, 0.030)), 100, 73, False),  # also if it had more tokens
        (((50, 0.036),), 100, 73, True),  # one of fewer tokens is not longer
        (((25, 0.027), (50, 0.030)), 100, 73, True),  # each token more took .12 ms
        (((25, 0.028), (50, 0.030)), 100, 73, False),
        (((200, 0.072),), 100, 73, True),  # of twice as many tokens: at least half of it
        (((200, 0.038), (400, 0.042)), 100, 73, True),  # and what is fixed: .02 ms less for each token less
        (((200, 0.037), (400, 0.042)), 100, 73, False),
    ],
)
def test_every_layer_must_be_there_before_its_use(
    made: Sequence[tuple[int, float]], num_mb: float, there: float, *, expected: bool
) -> None:
    """With a quarter more time than the copies took, and a millisecond."""
    assert paces(made).are_in_time(pending(num_mb, there=there), 100) is expected


def test_before_a_load_was_measured_nothing_is_early() -> None:
    """Unless nothing is missing, and then there is nothing to gain."""
    assert not paces(per_mb_s=0).are_in_time(pending(20, there=20), 100)


def test_who_had_to_wait_begins_later() -> None:
    """By as much, until it is forgotten."""
    made = paces()
    assert made.are_in_time(pending(100, there=73), 100)
    made.note_early(100, 0.037, waited_s=0.001)
    assert not made.are_in_time(pending(100, there=73), 100)
    assert made.are_in_time(pending(100, there=74), 100)
    for _ in range(128):
        made.note_early(100, 0.036, waited_s=0.0)
    assert made.are_in_time(pending(100, there=73), 100)


def test_a_pass_that_the_device_is_not_past_says_nothing() -> None:
    """It is asked for later."""
    from kvshare.vllm_connector.worker.paces import Paces

    past = [False]
    made = Paces(lambda began, ended: ended - began if past[0] else None)
    made.note_load(10, 1e-8)
    made.note_pass(100, 0.0, 0.036)
    assert not made.are_in_time(pending(20, there=20), 100)
    past[0] = True
    assert made.are_in_time(pending(20, there=20), 100)


@pytest.mark.parametrize("jitter", [0.05, 0.15, 0.4])
@pytest.mark.parametrize(("num_mb", "pass_s"), [(42, 0.050), (84, 0.020), (20, 0.200)])
def test_one_load_in_a_hundred_is_late_at_most(num_mb: float, pass_s: float, jitter: float) -> None:
    """By more than 1 ms, or 2 % of its pass: however much the speed of copies and passes varies."""
    chance, num_late, num_early = random.Random(7), 0, 0
    made = paces([(100, pass_s)])
    for _ in range(1500):
        of_mb_s = 1e-3 * max(0.3, chance.lognormvariate(0.0, jitter))
        took_s = pass_s * max(0.5, chance.lognormvariate(0.0, jitter / 2))
        steps = range(201)

        def is_due(step: int) -> bool:
            return made.are_in_time(pending(num_mb, there=num_mb * step / 200), 100)

        there = num_mb * bisect_left(steps, True, key=is_due) / 200
        waited_s, at = 0.0, 0.0
        for num_bytes in pending(num_mb, there=there):
            waited_s += max(0.0, num_bytes / MB * of_mb_s - at)
            at = max(at, num_bytes / MB * of_mb_s) + took_s / LAYERS
        made.note_early(100, took_s + waited_s, waited_s=waited_s)
        made.note_load(round(num_mb * MB), num_mb * of_mb_s)
        num_late += waited_s > max(0.001, 0.02 * took_s)
        num_early += there < num_mb
    assert num_late <= 15
    assert num_early >= 1450, "it gains something"
