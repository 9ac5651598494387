"""Drafts that are accepted less often with sharing stop it, whatever the times say."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest

from kvshare.reasons import Reason
from kvshare.sharing.control import Controller, Treatment
from kvshare.sharing.control.acceptance import Acceptance
from kvshare.sharing.control.blocks import Arm, TimeBlock
from kvshare.sharing.control.rungs import Rung
from tests.kvshare.sharing.control.on_rung import put_on
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


def new_block(number: int, *, shares: bool) -> TimeBlock:
    """One whose requests are over."""
    arm = Arm.USUAL if shares else Arm.UNSHARED
    return TimeBlock(arm, Rung.EVERYTHING, 1, 0, float(number), 1, 0.1, is_over=True)


def compared(
    acceptance: Acceptance, chance: random.Random, num_blocks: int, accepted: Callable[[bool], float]
) -> float | None:
    """Blocks of a few answers, one of ten without sharing, until there is a finding."""
    for number in range(num_blocks):
        shares = number % 10 > 0
        block, here = new_block(number, shares=shares), accepted(shares)
        for _ in range(chance.randrange(1, 8)):
            more_steps = acceptance.add(block, 60, steps_of(chance, 60, accepted=here))
            if more_steps is not None:
                return more_steps
    return None


@pytest.mark.parametrize("seed", range(5))
def test_equal_acceptance_is_never_found_to_differ(seed: int) -> None:
    chance = random.Random(seed)
    assert compared(Acceptance(0.99), chance, 1000, lambda _: 0.7) is None


@pytest.mark.parametrize("seed", range(5))
def test_answers_of_one_block_that_resemble_each_other_are_one_figure(seed: int) -> None:
    """Blocks differ, of both kinds alike: a block of prose after one of code."""
    chance = random.Random(seed)
    assert compared(Acceptance(0.99), chance, 1000, lambda _: chance.choice((0.3, 0.9))) is None


def test_one_block_is_not_enough(new_blocks: Callable[[bool], TimeBlock]) -> None:
    """However many answers it has."""
    acceptance = Acceptance(0.99)
    for shares in (True, False, True, False, True, False):
        block = new_blocks(shares)
        for number in range(50):
            assert acceptance.add(block, 60, (40 if shares else 20) + number % 3) is None


def test_what_is_reported_after_its_block_was_compared_changes_nothing(
    new_blocks: Callable[[bool], TimeBlock],
) -> None:
    """It would count as one block more."""
    acceptance, first = Acceptance(0.99), new_blocks(False)
    acceptance.add(first, 60, 20)
    for _ in range(12):
        acceptance.add(new_blocks(True), 60, 40)
    for _ in range(20):
        assert acceptance.add(first, 60, 20) is None


def test_a_block_counts_once_its_requests_are_over(new_blocks: Callable[[bool], TimeBlock]) -> None:
    """Its longest answers come last."""
    acceptance, first = Acceptance(0.99), new_blocks(False)
    first.num_running = 1
    for _ in range(5):
        acceptance.add(first, 60, 20)
        acceptance.add(new_blocks(True), 60, 20)
    assert not first.is_compared
    first.num_running = 0
    acceptance.add(new_blocks(True), 60, 20)
    assert first.is_compared


@pytest.fixture
def new_blocks() -> Callable[[bool], TimeBlock]:
    numbers = count()
    return lambda shares: new_block(next(numbers), shares=shares)


@pytest.mark.parametrize("seed", range(5))
def test_a_halved_acceptance_is_found_after_few_blocks(seed: int) -> None:
    """And a higher one never counts as a loss."""
    chance = random.Random(seed)
    found = compared(Acceptance(0.99), chance, 300, lambda shares: 0.3 if shares else 0.8)
    assert found is not None
    assert found > 0.3
    assert compared(Acceptance(0.99), chance, 300, lambda shares: 0.8 if shares else 0.3) is None


def test_short_answers_say_nothing(new_blocks: Callable[[bool], TimeBlock]) -> None:
    acceptance = Acceptance(0.99)
    for number in range(400):
        block = new_blocks(bool(number % 2))
        assert acceptance.add(block, 7, 7 if number % 2 else 2) is None
        assert acceptance.add(block, 60, 0) is None


class Served:
    """Answers whose drafts are accepted less often with sharing, and which take less time in all."""

    def __init__(self, *, rung: Rung = Rung.EVERYTHING) -> None:
        self.chance, self.now = random.Random(1), 0.0
        self.controller = Controller(
            CHOSEN.model_copy(update={"unshared_share": 0.2, "first_requests": 0}),
            full_s=lambda _: 1.0,
            break_even=lambda: 0,
            clock=lambda: self.now,
            chance=self.chance.random,
        )
        put_on(self.controller, rung)

    def serve(self, num_tokens: int = 1000) -> Treatment:
        with self.controller.take(num_tokens, 1) as treatment:
            self.now += 1.0 if treatment.refusal is None else 2.0
            treatment.complete(60)
        return treatment

    def report(self, treatment: Treatment, accepted: float) -> None:
        self.controller.note_steps(treatment, 60, steps_of(self.chance, 60, accepted=accepted))

    def until_stopped(self, caplog: pytest.LogCaptureFixture) -> list[Treatment]:
        """Returns all requests, which are reported once each."""
        served = list[Treatment]()
        while len(served) < 4000 and not caplog.messages:
            served.append(self.serve())
            self.report(served[-1], 0.3 if served[-1].refusal is None else 0.8)
        return served


def test_the_controller_stops_sharing_that_lowers_acceptance(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    server = Served()
    server.until_stopped(caplog)
    (line,) = caplog.messages
    assert line.startswith("sharing stops: drafts are accepted less often with it, answers take ")
    status = server.controller.status()
    assert {each.rung for each in status.loads} == {int(Rung.NOTHING)}
    assert status.changes["reduced"] == 1
    assert server.serve().refusal is Reason.REDUCED


def test_answers_that_were_on_their_way_do_not_stop_it_again(caplog: pytest.LogCaptureFixture) -> None:
    """Sharing that stopped is tried again as soon as after one loss."""
    caplog.set_level(logging.WARNING)
    server = Served()
    served = server.until_stopped(caplog)
    for treatment in served:
        assert treatment.block is not None
        treatment.block.is_compared = False  # as if none of its answers had been reported
        server.report(treatment, 0.3 if treatment.refusal is None else 0.8)
    assert len(caplog.messages) == 1


def test_short_prompts_that_are_shared_no_more_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Their drafts are accepted as they always were: not of the sharing of long ones."""
    caplog.set_level(logging.WARNING)
    server, reasons = Served(rung=Rung.DOUBLE), Counter[Reason | None]()
    for number in range(3000):
        is_long = number % 2 == 0
        treatment = server.serve(8000 if is_long else 300)
        reasons[treatment.refusal] += 1
        server.report(treatment, 0.3 if is_long else 0.8)
    assert reasons[Reason.EXPERIMENT] > 50
    assert reasons[Reason.REDUCED] > 50
    assert not [line for line in caplog.messages if line.startswith("sharing stops")]


def test_requests_that_take_no_part_say_nothing() -> None:
    controller = Controller(CHOSEN, full_s=lambda _: 1.0, break_even=lambda: 0)
    for number in range(100):
        controller.note_steps(Treatment(), 60, 60 if number % 2 else 20)
    assert controller.status().loads == ()
