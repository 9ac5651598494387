"""
When a disk that was fast is believed to be slow, and when it is tried again.

Rates are fitted to relative errors, so a read that takes a hundred times as long as others counts next to
nothing. One may be a hiccup, and believing it would cost whole prefills; each late one costs a little.

    late, late       earlier observations are put aside: the last one alone says how fast the disk is
    a while later    they are believed again, so that the next plan reads; if that is late, they are put aside
    a read in time   ends all this
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvshare.sharing.regression import Regression, Row

_BELIEVED: Final = 2  # late reads in a row
_AGAIN_S: Final = 30.0


class LateReads:
    """Of one disk. Not thread-safe."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_late = 0  # in a row
        self._aside: list[Row] = []
        self._again_at = 0.0

    def note(self, line: Regression, *, is_late: bool) -> None:
        """Note a read before it is added to the observations of its line."""
        self._num_late = self._num_late + 1 if is_late else 0
        if not is_late:
            self._aside = []
        elif self._num_late >= _BELIEVED:
            self._aside = self._aside or line.rows()
            self._again_at = self._clock() + _AGAIN_S
            line.restore(())

    def end(self, line: Regression) -> bool:
        """Believe what was put aside, if it is time. Returns whether the line has changed."""
        if not self._aside or self._clock() < self._again_at:
            return False
        line.restore(self._aside)
        self._aside, self._num_late = [], _BELIEVED - 1
        return True
