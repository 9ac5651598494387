"""
What is shared at one load: a state machine over the rungs.

    usual blocks are slower than unshared ones            -> one rung lower
    trial blocks, one rung higher, are faster             -> one rung higher
    a trial lost, or a return was undone                  -> the next trial of that rung waits twice as long

A comparison that is certain, or full, begins again, so that earlier traffic is forgotten.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvshare.sharing.control.blocks import Arm, BlockFigures, TimeBlock
from kvshare.sharing.control.contest import Contest
from kvshare.sharing.control.rungs import Rung
from kvshare.sharing.control.sequential import Finding

_RAISED = 5  # factor on the share of an experiment while its result is open
_MOST_SHARE = 0.25  # the highest raised share of the blocks
_TRIAL_BLOCKS = 10
_FILLING_BLOCKS = 5  # the first blocks of a trial store what the others may copy, and do not count
_REST_S, _MOST_REST_S = 60.0, 6 * 3600.0  # between trials of one rung
_REMEMBERED = 16  # usual blocks with which a block is compared


@dataclass(frozen=True, slots=True)
class RungChange:
    """A load is served on another rung from now on."""

    load: int
    before: Rung
    after: Rung
    slower: float  # by what share of the time more sharing was slower; negative: it was faster


class LoadLevel:
    """One load level. Called by the controller, under its lock."""

    def __init__(self, load: int, *, share: float, confidence: float) -> None:
        self.load = load
        self.rung = Rung.EVERYTHING
        self.epoch = 0  # grows with each change of the rung
        self._share, self._confidence = share, confidence
        self._num_lost: Counter[Rung] = Counter()  # how often a rung lost (also in trials) since it last paid
        self._tried_from: dict[Rung, float] = {}  # when a rung that lost may be tried again
        self._trial_left = 0  # blocks that remain of the trial in progress
        self._answering_s, self._num_output = 0.0, 0.0  # seconds and tokens of answers; old ones count less
        self._knows_answers = False
        self._begin()

    def _begin(self) -> None:
        self.against_nothing = Contest(self._confidence)  # usual blocks with unshared ones
        self.against_higher = Contest(self._confidence)  # trial blocks with usual ones
        self._baseline = BlockFigures(0.0, 0.0)  # the mean of the last usual blocks
        self._num_usual = 0  # the number of usual blocks so far
        self._trial_left = 0

    def arm(self, chance: Callable[[], float], now: float, *, may_experiment: bool) -> tuple[Arm, bool]:
        """Choose how the next block is served, and whether it counts. `chance`: a random number below 1."""
        if self._trial_left:
            self._trial_left -= 1
            return Arm.TRIAL, self._trial_left < _TRIAL_BLOCKS - _FILLING_BLOCKS
        if not may_experiment:
            return Arm.USUAL, True
        unshared, trial = self._unshared_share, self._trial_share(now) / _TRIAL_BLOCKS
        drawn = chance()
        if drawn < unshared:
            return Arm.UNSHARED, True
        if drawn < unshared + trial:
            self._trial_left = _TRIAL_BLOCKS - 1
            return Arm.TRIAL, False
        return Arm.USUAL, True

    @property
    def _unshared_share(self) -> float:
        """Return a higher share at first, and while sharing seems to harm, to decide that sooner."""
        if self.rung is Rung.NOTHING:
            return 0.0
        is_open = not self.against_nothing.has_ended or self.against_nothing.leans(Finding.SLOWER)
        return self._raised() if is_open else self._share

    def _trial_share(self, now: float) -> float:
        """Return the share of trials: higher only while they seem to pay, as a trial may harm."""
        if self.rung is Rung.EVERYTHING or now < self._tried_from.get(self.rung.higher, now):
            return 0.0
        return self._raised() if self.against_higher.leans(Finding.FASTER) else self._share

    def _raised(self) -> float:
        return max(self._share, min(_MOST_SHARE, _RAISED * self._share))

    def fold(self, block: TimeBlock, now: float) -> RungChange | None:
        """
        Learn from a block whose requests are over. If it decides a comparison, change the rung.

        The block is compared with the usual blocks before it: they follow slow changes of the traffic, and
        the way in which this block was served cannot have influenced them.
        """
        figures = block.figures
        if figures is None or block.epoch != self.epoch:
            return None
        excess, is_known = figures.less(self._baseline), self._num_usual > 0
        if block.arm is Arm.USUAL:
            self._learn(block, figures)
        if not is_known:
            return None
        return self._reduced(block.arm, excess, now) or self._returned(block.arm, excess, now)

    @property
    def token_s(self) -> float:
        """Seconds per token of an answer in usual blocks at this load, including waits."""
        return self._answering_s / max(1.0, self._num_output)

    def _learn(self, block: TimeBlock, figures: BlockFigures) -> None:
        """
        Learn from a usual block what later blocks are compared with; a trial would change its own measure.

        The first block only teaches how long answers take: without that, its figures say nothing.
        """
        if self._knows_answers:
            self._num_usual += 1
            share = 1 / min(self._num_usual, _REMEMBERED)
            self._baseline = self._baseline.towards(figures, share)
        keep = 1 - 1 / _REMEMBERED
        self._answering_s = keep * self._answering_s + block.answering_s
        self._num_output = keep * self._num_output + block.num_output
        self._knows_answers = True

    def _reduced(self, arm: Arm, excess: BlockFigures, now: float) -> RungChange | None:
        """Move one rung lower, if usual blocks turn out slower than unshared ones."""
        if arm is Arm.TRIAL or self.rung is Rung.NOTHING:
            return None
        finding = self.against_nothing.add(excess, shares_more=arm is Arm.USUAL)
        if finding is Finding.FASTER:
            self._num_lost[self.rung] = 0
        if finding is not Finding.SLOWER:
            return None
        self._rest(self.rung, now)
        return self._move(self.rung.lower, self.against_nothing)

    def _returned(self, arm: Arm, excess: BlockFigures, now: float) -> RungChange | None:
        """Move one rung higher, if trial blocks turn out faster than usual ones."""
        if arm is Arm.UNSHARED or self.rung is Rung.EVERYTHING:
            return None
        finding = self.against_higher.add(excess, shares_more=arm is Arm.TRIAL)
        if finding is Finding.SLOWER:
            self._trial_left = 0
            self._rest(self.rung.higher, now)
        return self._move(self.rung.higher, self.against_higher) if finding is Finding.FASTER else None

    def stop(self, now: float) -> bool:
        """
        Share nothing from now on except in trials, whatever the times say. Returns whether the rung changed.
        """
        self._rest(Rung.NOTHING.higher, now)
        was_shared = self.rung is not Rung.NOTHING
        if was_shared:
            self.rung = Rung.NOTHING
            self.epoch += 1
            self._begin()
        self._trial_left = 0
        return was_shared

    def _rest(self, lost: Rung, now: float) -> None:
        self._tried_from[lost] = now + min(_MOST_REST_S, _REST_S * 2 ** min(20, self._num_lost[lost]))
        self._num_lost[lost] += 1

    def _move(self, rung: Rung, contest: Contest) -> RungChange:
        change = RungChange(self.load, self.rung, rung, math.expm1(contest.last or 0.0))
        self.rung = rung
        self.epoch += 1
        self._begin()
        return change
