"""
Whether drafts are accepted as often with sharing as without, where the engine decodes speculatively.

Blocks of time compare how long requests take in all, of which a short answer's drafts are a small part.
Copied KV cannot change what is accepted of the requests next to it, so single requests are compared here: the
steps for each token of an answer. A first token that comes sooner does not excuse an answer that takes more
steps.
"""

from __future__ import annotations

import math

from kvshare.sharing.control.contest import LEAST
from kvshare.sharing.control.sequential import Finding, SequentialTest

_FEWEST_TOKENS = 8  # of an answer, after its first: fewer say little


class Acceptance:
    """One comparison of requests that may share with those that may not. Used under the controller's lock."""

    def __init__(self, confidence: float) -> None:
        self._confidence = confidence
        self._test = SequentialTest(confidence, LEAST)

    def add(self, num_tokens: int, num_steps: int, *, may_share: bool) -> float | None:
        """
        An answer, whose steps gave so many tokens after its first one.

        Returns: by what share answers take more steps with sharing, once that is sure and matters. It begins
        again then.
        """
        if num_steps < 1 or num_tokens < _FEWEST_TOKENS:
            return None
        self._test.add(math.log(num_steps / num_tokens), shares_more=may_share)
        finding, difference = self._test.finding(), self._test.difference
        if finding is not None or self._test.is_full:
            self._test = SequentialTest(self._confidence, LEAST)
        return math.expm1(difference) if finding is Finding.SLOWER and difference is not None else None
