"""
Blocks of time: the unit of the experiment. All requests that arrive in one block are served the same way.

Sharing harms mostly the requests that run at the same time: copies and saves slow all of them down, with and
without sharing alike. A comparison of single requests cannot see that; one of whole blocks can (a switchback
experiment). Requests of one block resemble each other, so each measure gets one figure per block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from kvshare.sharing.control.rungs import Rung


class Arm(StrEnum):
    """The ways in which a block is served."""

    USUAL = "usual"  # as the rung of its load says
    UNSHARED = "unshared"  # without sharing
    TRIAL = "trial"  # one rung higher


class BlockFigures(NamedTuple):
    """The figures of a block for its arm; the lower, the faster."""

    throughput: float
    times: float

    def less(self, other: BlockFigures) -> BlockFigures:
        """Subtract the figures of another block from these."""
        return BlockFigures(self.throughput - other.throughput, self.times - other.times)

    def towards(self, other: BlockFigures, share: float) -> BlockFigures:
        """Return the figures that lie a share of the way from these to others."""
        far = other.less(self)
        return BlockFigures(self.throughput + share * far.throughput, self.times + share * far.times)


@dataclass(slots=True, eq=False)
class TimeBlock:
    """
    One block, and the sums over its requests that are over.

    The figure of a request is the seconds until its answer was complete, over the seconds that it would
    take without sharing by the learned costs: so long prompts and long answers do not count as slow. A
    block gives two figures. `times` is the mean of the requests' logarithms: what a user sees. `throughput`
    is the logarithm of all seconds over all expected seconds. With a fixed number N of requests in flight
    it is the throughput: in T seconds the requests of a block spend N T seconds together (Little's law), so
    expected seconds of work per second, E / T, are N E over the sum of the seconds. Blocks are compared at
    about equal N.
    """

    arm: Arm
    rung: Rung
    load: int  # the load level when it began
    epoch: int  # of the load level
    began: float
    first_in_flight: int  # requests in flight when it began, with its first one
    token_s: float  # seconds per token of an answer at this load, as learned before
    counts: bool = True  # false: it only prepares the store for the blocks after it
    is_over: bool = False  # no further request will arrive
    is_compared: bool = False  # by `Acceptance`
    num_running: int = 0
    num_arrived: int = 0
    sum_in_flight: int = 0
    answering_s: float = 0.0  # of complete requests, without the expected seconds of their prefills
    num_output: int = 0  # tokens of their answers
    _number: int = 0
    _seconds: float = 0.0
    _expected: float = 0.0
    _logarithms: float = 0.0

    def add(self, seconds: float, full_s: float, num_output: int, *, counts: bool) -> None:
        """
        Add a complete request. `full_s`: the expected seconds of its prefill without sharing.

        `counts`: when it arrived, at least half of the requests in flight belonged to this block.
        """
        self.answering_s += max(0.0, seconds - full_s)
        self.num_output += num_output
        if counts:
            expected = max(1e-6, full_s + num_output * self.token_s)
            self._number += 1
            self._seconds += seconds
            self._expected += expected
            self._logarithms += math.log(max(seconds, 1e-9) / expected)

    @property
    def is_settled(self) -> bool:
        """Return whether all its requests are over."""
        return self.is_over and not self.num_running

    @property
    def mean_in_flight(self) -> int:
        return round(self.sum_in_flight / max(1, self.num_arrived))

    @property
    def figures(self) -> BlockFigures | None:
        """Return the figures of the block; None if no request counted."""
        if not self._number or not self.counts:
            return None
        return BlockFigures(math.log(self._seconds / self._expected), self._logarithms / self._number)
