"""
Whether candidates have anything of what a composition of one donor leaves open, without aligning them.

Asked for are the prompt's k-grams that reach into open positions. A candidate with none of them can cover
no more.
"""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from delta_tree.edits import Match
from delta_tree.kgrams import Hashes, Ids, Places, Sieve
from delta_tree.spans import consecutive
from delta_tree.target import Target

_FEW = 1 / 64  # of the prompt after its exact prefix: what other copies may cover in addition
_MANY_HITS = 1 << 14  # k-grams that are compared token by token; with more, runs are searched for

Mask = npt.NDArray[np.bool_]


class LeftOpen:
    """The open positions of a prompt after its exact prefix, `start` tokens, and its runs are copied."""

    def __init__(self, target: Target, runs: Iterable[Match], start: int) -> None:
        self._target, self._start = target, start
        self.is_closed: Mask = np.zeros(len(target.tokens), dtype=np.bool_)
        self.is_closed[:start] = True
        for run in runs:
            self.is_closed[run.target : run.target_end] = True
        self._num_open = np.zeros(len(target.tokens) + 1, dtype=np.int32)  # before each position
        np.cumsum(~self.is_closed, dtype=np.int32, out=self._num_open[1:])
        k = target.min_run
        self._is_asked: Mask = self._num_open[k:] > self._num_open[:-k]
        self._is_asked[:start] = False  # no other copy begins in the exact prefix
        self._gained: list[Places] = []

    @property
    def closed_kgrams(self) -> Places:
        """Return the positions of the prompt's k-grams that are not asked for."""
        return np.flatnonzero(~self._is_asked)

    @cached_property
    def _asked(self) -> tuple[Hashes, Places]:
        """Return the hashes asked for, ascending, and where each stands in the prompt."""
        positions = np.flatnonzero(self._is_asked)
        hashes = self._target.hashes.take(positions)
        order = hashes.argsort()
        return hashes.take(order), positions.take(order)

    @cached_property
    def _sieve(self) -> Sieve:
        return Sieve(self._asked[0])

    def may_gain(self, tokens: Ids, hashes: Hashes, places: Places | None = None) -> bool:
        """
        Note what these tokens have of what is open. Return whether that is more than a few tokens.

        Shapes:  (S,) and the hashes of their k-grams; `places`: only these k-grams
        """
        (open_hashes, positions), k = self._asked, self._target.min_run
        if not len(open_hashes):
            return False
        passing = self._sieve.passing(hashes, places)
        asked = hashes.take(passing)
        lows = open_hashes.searchsorted(asked)
        counts = open_hashes.searchsorted(asked, side="right") - lows
        if int(counts.sum()) > _MANY_HITS:
            return True
        at, of = consecutive(lows, counts)
        wanted, offsets = positions[at], np.arange(k)
        theirs, own = tokens[passing[of, None] + offsets], self._target.tokens[wanted[:, None] + offsets]
        gained = wanted[(theirs == own).all(axis=1)]
        if not len(gained):
            return False
        self._gained.append(gained)
        return bool((self._num_open[gained + k] - self._num_open[gained] == k).any()) or self._is_much()

    def _is_much(self) -> bool:
        edges = np.zeros(len(self.is_closed) + 1, dtype=np.int64)
        for found in self._gained:
            np.add.at(edges, found, 1)
            np.add.at(edges, found + self._target.min_run, -1)
        is_gained = (np.cumsum(edges[:-1]) > 0) & ~self.is_closed
        return int(np.count_nonzero(is_gained)) > _FEW * (len(self.is_closed) - self._start)
