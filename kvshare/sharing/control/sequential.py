"""
Compares two ways of serving while figures come in: a sequential test, whose result may be read at any time.

An ordinary test that is repeated after every figure finds a difference sooner or later, even if there is
none. The mixture sequential probability ratio test (Johari et al., "Peeking at A/B tests", KDD 2017) does
not: if there is none, it finds one with at most the chosen probability, however often it is repeated.

Knows neither requests nor rungs. Not thread-safe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

_EXPECTED = 0.1  # the size of differences that the test finds soonest
_FEWEST_TO_LEAN, _FEWEST = 3, 8  # figures in each group that a difference needs, and that a finding needs
_MOST = 250  # figures in the smaller group, after which a comparison begins again: traffic changes
_FARTHEST = 1.0  # a figure farther from 0 counts as if it were this far


class Finding(Enum):
    """The result of a test about the group that shares more."""

    SLOWER = "slower"
    FASTER = "faster"


@dataclass(slots=True)
class Moments:
    """Number, mean and spread of figures, by Welford's method."""

    number: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of the squared distances from the mean

    def add(self, figure: float) -> None:
        self.number += 1
        distance = figure - self.mean
        self.mean += distance / self.number
        self.squares += distance * (figure - self.mean)


@dataclass(slots=True)
class SequentialTest:
    """
    Tests the difference of two groups' means. `more` is the group that shares more. Figures are logarithms.

    `confidence`: 1 less the chance that a difference is found where there is none.
    `least`: a difference that is not larger does not matter.
    """

    confidence: float
    least: float
    more: Moments = field(default_factory=Moments)
    less: Moments = field(default_factory=Moments)

    def add(self, figure: float, *, shares_more: bool) -> None:
        """Add a figure that is independent of the others of its group."""
        (self.more if shares_more else self.less).add(max(-_FARTHEST, min(_FARTHEST, figure)))

    @property
    def num_each(self) -> int:
        """Return the number of figures of the smaller group."""
        return min(self.more.number, self.less.number)

    @property
    def is_full(self) -> bool:
        """Return whether there are so many figures that old ones say little about today's traffic."""
        return self.num_each >= _MOST

    @property
    def difference(self) -> float | None:
        """Return the logarithm of how much longer `more` takes; None while there are too few figures."""
        return self.more.mean - self.less.mean if self.num_each >= _FEWEST_TO_LEAN else None

    @property
    def leaning(self) -> float:
        """Return the difference so far in units of its standard error; 0 while there are too few figures."""
        if (difference := self.difference) is None or (variance := self._variance()) <= 0:
            return 0.0
        return difference / math.sqrt(variance)

    def finding(self) -> Finding | None:
        """Return the finding that is certain by now, or None."""
        difference = self.difference
        if difference is None or self.num_each < _FEWEST or abs(difference) <= self.least:
            return None
        if not self._is_sure(difference):
            return None
        return Finding.SLOWER if difference > 0 else Finding.FASTER

    def _is_sure(self, difference: float) -> bool:
        """
        Return whether the likelihood of this difference, over that of none, is above 1 / (1 - confidence).

        The mixture: differences are normally distributed about 0 with a standard deviation of `_EXPECTED`.
        The logarithms are compared, because the ratio itself overflows.
        """
        variance = self._variance()
        if variance <= 0:
            return True
        expected = _EXPECTED**2
        ratio = 0.5 * math.log(variance / (variance + expected))
        ratio += expected * difference**2 / (2 * variance * (variance + expected))
        return ratio >= -math.log(1 - self.confidence)

    def _variance(self) -> float:
        """
        Return the variance of the difference of the means.

        By chance the smaller group may have none of the rare slow requests, and seem faster and steadier than
        it is. So the variance of a group is at least that of both together.
        """
        groups = (self.more, self.less)
        both = sum(group.squares for group in groups) / (self.more.number + self.less.number - 2)
        return sum(max(both, group.squares / (group.number - 1)) / group.number for group in groups)
