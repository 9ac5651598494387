"""
Compares more sharing with less, by throughput and by times: two sequential tests, and their joint finding.
"""

from __future__ import annotations

import math

from kvshare.sharing.control.blocks import BlockFigures
from kvshare.sharing.control.sequential import Finding, SequentialTest

LEAST = 0.03  # a difference below 3 % does not matter
_LEANS = 1.0  # standard errors from which on figures suggest a finding


class Contest:
    """One comparison, from its first block to a finding, or until it is full; then it begins again."""

    def __init__(self, confidence: float) -> None:
        """`confidence`: of the finding. Each of the two tests gets a higher one, as either may be wrong."""
        self._confidence = confidence
        self.last: float | None = None  # the difference when it last ended
        self.has_ended = False
        self._begin()

    def _begin(self) -> None:
        each = 1 - (1 - self._confidence) / len(BlockFigures._fields)
        self._tests = tuple(SequentialTest(each, LEAST) for _ in BlockFigures._fields)

    def add(self, figures: BlockFigures, *, shares_more: bool) -> Finding | None:
        """
        Add a block. Returns a finding once it is certain; the contest then begins again without old traffic.

        More sharing is slower if either measure says so: a higher throughput does not excuse slower
        answers. It is faster if one measure says so and the other does not contradict.
        """
        for test, figure in zip(self._tests, figures, strict=True):
            test.add(figure, shares_more=shares_more)
        findings = {test.finding() for test in self._tests}
        finding: Finding | None = None
        if Finding.SLOWER in findings:
            finding = Finding.SLOWER
        elif Finding.FASTER in findings and (self._difference or 0.0) <= LEAST:
            finding = Finding.FASTER
        if finding is not None or any(test.is_full for test in self._tests):
            self.last = self._smallest if finding is Finding.FASTER else self._difference
            self.has_ended = True
            self._begin()
        return finding

    @property
    def _difference(self) -> float | None:
        """Return the logarithm of how much longer more sharing takes: the worse of the two measures."""
        known = [test.difference for test in self._tests if test.difference is not None]
        return max(known, default=None)

    @property
    def _smallest(self) -> float | None:
        return min((test.difference for test in self._tests if test.difference is not None), default=None)

    @property
    def difference(self) -> float | None:
        """Return the difference so far; while too little is known, that of the last contest."""
        current = self._difference
        return self.last if current is None else current

    @property
    def slower(self) -> float | None:
        """Return the difference as a share of the time: 0.1 means that more sharing is 10 % slower."""
        return None if (difference := self.difference) is None else math.expm1(difference)

    @property
    def num_blocks(self) -> tuple[int, int]:
        """Return how many blocks had more and less sharing, since the contest began."""
        return self._tests[0].more.number, self._tests[0].less.number

    def leans(self, finding: Finding) -> bool:
        """Return whether the figures so far suggest a finding, without being sure."""
        leanings = [test.leaning for test in self._tests]
        if finding is Finding.SLOWER:
            return max(leanings) > _LEANS
        return min(leanings) < -_LEANS
