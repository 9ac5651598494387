"""The ladder of one load: when it is reduced, when it returns, and when that is tried."""

from __future__ import annotations

import random

from kvshare.sharing.control import Rung
from kvshare.sharing.control.blocks import Arm, TimeBlock
from kvshare.sharing.control.load_level import LoadLevel, RungChange

TRIAL = 0.26  # what is drawn for a trial, where there may be one


class Ladder:
    """A load whose blocks take as long as the test says, about."""

    def __init__(self) -> None:
        self.level = LoadLevel(2, share=0.25, confidence=0.99)
        self.now = 0.0
        self._random = random.Random(0)

    def fold(self, seconds: dict[Arm, float], num_blocks: int = 300) -> RungChange | None:
        """Blocks of these arms, in turn, until the rung changes."""
        arms = list(seconds)
        for number in range(num_blocks):
            arm = arms[number % len(arms)]
            block = TimeBlock(arm, self.level.rung, 2, self.level.epoch, self.now, 1, self.level.token_s)
            took = seconds[arm] * self._random.lognormvariate(0, 0.1)
            block.add(took, full_s=1.0, num_output=10, counts=True)
            self.now += 1.0
            if (change := self.level.fold(block, self.now)) is not None:
                return change
        return None

    def drawn(self, after_s: float) -> Arm:
        arm, _ = self.level.arm(lambda: TRIAL, self.now + after_s, may_experiment=True)
        self.level._trial_left = 0
        return arm


def test_what_is_slower_than_nothing_goes_down_and_what_is_faster_goes_up() -> None:
    """One rung at a time; the change says by how much."""
    ladder = Ladder()
    down = ladder.fold({Arm.USUAL: 2.4, Arm.UNSHARED: 2.0})
    assert down is not None
    assert (down.before, down.after) == (Rung.EVERYTHING, Rung.WANTED_SAVES)
    assert 0.05 < down.slower < 0.4
    up = ladder.fold({Arm.USUAL: 2.0, Arm.TRIAL: 1.7})
    assert up is not None
    assert (up.before, up.after) == (Rung.WANTED_SAVES, Rung.EVERYTHING)
    assert -0.4 < up.slower < -0.05


def test_what_is_alike_stays_where_it_is() -> None:
    """On the highest rung as on a lower one: neither harm nor gain is taken for granted."""
    ladder = Ladder()
    assert ladder.fold({Arm.USUAL: 2.0, Arm.UNSHARED: 2.0}, 600) is None
    ladder.fold({Arm.USUAL: 2.4, Arm.UNSHARED: 2.0})
    assert ladder.fold({Arm.USUAL: 2.0, Arm.UNSHARED: 2.0, Arm.TRIAL: 2.0}, 600) is None
    assert ladder.level.rung is Rung.WANTED_SAVES


def test_the_lowest_rung_has_no_unshared_blocks_of_its_own() -> None:
    """All its blocks are unshared; only trials differ."""
    ladder = Ladder()
    for rung in list(Rung)[1:]:
        ladder.fold({Arm.USUAL: 2.4, Arm.UNSHARED: 2.0})
        assert ladder.level.rung is rung
    assert ladder.level.arm(lambda: 0.03, ladder.now + 1e6, may_experiment=True)[0] is Arm.USUAL
    assert ladder.level.arm(lambda: 0.02, ladder.now + 1e6, may_experiment=True)[0] is Arm.TRIAL


def test_a_rung_that_keeps_losing_is_tried_less_often() -> None:
    """However well the one below it pays; once it pays itself it may be tried as at first."""
    ladder = Ladder()
    assert ladder.drawn(0) is Arm.USUAL  # there is no higher rung
    ladder.fold({Arm.USUAL: 2.4, Arm.UNSHARED: 2.0})
    assert (ladder.drawn(50), ladder.drawn(70)) == (Arm.USUAL, Arm.TRIAL)
    ladder.fold({Arm.USUAL: 1.5, Arm.UNSHARED: 2.0}, 100)
    ladder.fold({Arm.USUAL: 2.0, Arm.TRIAL: 3.0}, 24)
    assert (ladder.drawn(70), ladder.drawn(130)) == (Arm.USUAL, Arm.TRIAL)
    ladder.fold({Arm.USUAL: 2.0, Arm.TRIAL: 1.5})
    ladder.fold({Arm.USUAL: 1.5, Arm.UNSHARED: 2.0}, 100)
    ladder.fold({Arm.USUAL: 2.4, Arm.UNSHARED: 2.0})
    assert (ladder.drawn(50), ladder.drawn(70)) == (Arm.USUAL, Arm.TRIAL)


def test_the_first_blocks_of_a_trial_only_fill_the_store() -> None:
    """What they store pays later; then five blocks count."""
    ladder = Ladder()
    ladder.fold({Arm.USUAL: 2.4, Arm.UNSHARED: 2.0})
    later = ladder.now + 100
    drawn = [ladder.level.arm(lambda: TRIAL, later, may_experiment=True) for _ in range(10)]
    assert drawn == [(Arm.TRIAL, False)] * 5 + [(Arm.TRIAL, True)] * 5
    assert ladder.level.arm(lambda: 0.9, later, may_experiment=True) == (Arm.USUAL, True)
