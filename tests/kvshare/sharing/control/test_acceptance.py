"""Drafts that are accepted less often with sharing stop it, whatever the times say."""

from __future__ import annotations

import logging
import random

import pytest

from kvshare.reasons import Reason
from kvshare.sharing.control import Controller, Treatment
from kvshare.sharing.control.acceptance import Acceptance
from kvshare.sharing.control.rungs import Rung
from tests.kvshare.sharing.control.simulated_server import CHOSEN


def steps_of(chance: random.Random, num_tokens: int, *, accepted: float) -> int:
    """Of an answer, where each of three drafts is accepted with that chance if those before it were."""
    num_steps, left = 0, num_tokens
    while left > 0:
        left -= 1
        num_steps += 1
        drafts = 3
        while drafts and left > 0 and chance.random() < accepted:
            drafts, left = drafts - 1, left - 1
    return num_steps


@pytest.mark.parametrize("seed", range(5))
def test_equal_acceptance_is_never_found_to_differ(seed: int) -> None:
    chance, acceptance = random.Random(seed), Acceptance(0.99)
    for number in range(3000):
        steps = steps_of(chance, 60, accepted=0.7)
        assert acceptance.add(60, steps, may_share=number % 10 > 0) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_halved_acceptance_is_found_after_few_answers(seed: int) -> None:
    """And a higher one never counts as a loss."""
    chance, acceptance = random.Random(seed), Acceptance(0.99)
    for number in range(400):
        may_share = number % 10 > 0
        steps = steps_of(chance, 60, accepted=0.3 if may_share else 0.8)
        if (more_steps := acceptance.add(60, steps, may_share=may_share)) is not None:
            assert more_steps > 0.3
            break
    else:
        pytest.fail("not found")
    better = Acceptance(0.99)
    for number in range(400):
        may_share = number % 10 > 0
        steps = steps_of(chance, 60, accepted=0.8 if may_share else 0.3)
        assert better.add(60, steps, may_share=may_share) is None


def test_short_answers_say_nothing() -> None:
    acceptance = Acceptance(0.99)
    for number in range(400):
        assert acceptance.add(7, 7 if number % 2 else 2, may_share=bool(number % 2)) is None
        assert acceptance.add(60, 0, may_share=bool(number % 2)) is None


def test_the_controller_stops_sharing_that_lowers_acceptance(caplog: pytest.LogCaptureFixture) -> None:
    """Requests that share take less time in all, and more steps."""
    chance, now = random.Random(1), [0.0]
    settings = CHOSEN.model_copy(update={"unshared_share": 0.2, "first_requests": 0})
    controller = Controller(
        settings,
        full_s=lambda _: 1.0,
        break_even=lambda: 0,
        clock=lambda: now[0],
        chance=chance.random,
    )

    def serve() -> Treatment:
        with controller.take(1000, 1) as treatment:
            now[0] += 1.0 if treatment.refusal is None else 2.0
            treatment.complete(60)
        may_share = treatment.refusal is None
        steps = steps_of(chance, 60, accepted=0.3 if may_share else 0.8)
        controller.note_steps(treatment, 60, steps)
        return treatment

    with caplog.at_level(logging.WARNING):
        for _ in range(2000):
            serve()
            if caplog.messages:
                break
    (line,) = caplog.messages
    assert line.startswith("sharing stops: drafts are accepted less often with it, answers take ")
    status = controller.status()
    assert {each.rung for each in status.loads} == {int(Rung.NOTHING)}
    assert status.changes["reduced"] == 1
    assert serve().refusal is Reason.REDUCED


def test_requests_that_take_no_part_say_nothing() -> None:
    controller = Controller(CHOSEN, full_s=lambda _: 1.0, break_even=lambda: 0)
    for number in range(100):
        controller.note_steps(Treatment(), 60, 60 if number % 2 else 20)
    assert controller.status().loads == ()
