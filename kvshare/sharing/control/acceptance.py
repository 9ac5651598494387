"""
Whether drafts are accepted as often with sharing as without, if the engine decodes speculatively.

Elsewhere, blocks of time are compared by how long requests take in all, of which the drafts of a short answer
are a small part. Here they are compared by the steps per token of answers: a first token that comes sooner
does not excuse an answer that takes more steps. Answers of one block resemble each other, so the mean of a
block counts as one figure.
"""

from __future__ import annotations

import math

from kvshare.sharing.control.blocks import Arm, TimeBlock
from kvshare.sharing.control.contest import LEAST
from kvshare.sharing.control.sequential import Finding, Moments, SequentialTest

_FEWEST_TOKENS = 8  # of an answer, after its first one; shorter answers say little
_LEFT_OPEN = 2  # newest blocks that are not compared yet: reports of their answers may still come


class Acceptance:
    """One comparison of blocks that may share with those that may not. Used under the controller's lock."""

    def __init__(self, confidence: float) -> None:
        self._confidence = confidence
        self._begin()
        self._open: dict[TimeBlock, Moments] = {}  # not compared yet; the newest last

    def _begin(self) -> None:
        self._test = SequentialTest(self._confidence, LEAST)

    def add(self, block: TimeBlock, num_tokens: int, num_steps: int) -> float | None:
        """
        Add an answer of a block: `num_steps` steps gave `num_tokens` tokens after the first one.

        Returns: by what share answers take more steps with sharing, once that is certain and matters; the
        comparison begins again then. None before
        """
        if block.is_compared or num_steps < 1 or num_tokens < _FEWEST_TOKENS:
            return None
        self._open.setdefault(block, Moments()).add(math.log(num_steps / num_tokens))
        for each in tuple(self._open)[:-_LEFT_OPEN]:
            if each.is_settled and (more_steps := self._compare(each)) is not None:
                self._open.clear()
                return more_steps
        return None

    def _compare(self, block: TimeBlock) -> float | None:
        block.is_compared = True
        self._test.add(self._open.pop(block).mean, shares_more=block.arm is not Arm.UNSHARED)
        finding, difference = self._test.finding(), self._test.difference
        if finding is not None or self._test.is_full:
            self._begin()
        return math.expm1(difference) if finding is Finding.SLOWER and difference is not None else None
