"""Computes the beginning of a prompt while the KV of what comes after it is read from disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from kvshare.embedded.decoder import RunningPrefill
from kvshare.kv.tier import Fetched, PendingReads
from kvshare.sharing.plan import Plan

_LOOK_S: Final = 0.005  # of one quantum that waits: other requests have theirs in between


class AheadPrefill:
    """
    A `RunningPrefill` for the first part of a plan that is split, see `sharing/splitting.py`.

        [ beginning: computed ][ copies, placeholders: once all is read, or late; see `go_on` ]
    """

    def __init__(
        self,
        beginning: RunningPrefill,
        plan: Plan,
        reads: PendingReads,
        go_on: Callable[[Fetched, float], object],
    ) -> None:
        """
        `go_on`: replaces this by the prefill of the rest. It gets what was read, and for how many seconds
        nothing could be computed.
        """
        self.plan = plan
        self._beginning, self._reads, self._go_on = beginning, reads, go_on
        self._num_left = plan.num_ahead
        self._waited_s = 0.0

    def advance(self, *, max_queries: int) -> tuple[int, None]:
        """Compute a chunk of the beginning, or wait for a moment and compute nothing. There are no logits."""
        if self._num_left:
            num_computed, _ = self._beginning.advance(max_queries=max_queries)
            self._num_left -= num_computed
            return num_computed, None
        began = time.perf_counter()
        is_over = self._reads.wait(_LOOK_S)
        self._waited_s += time.perf_counter() - began
        if is_over:
            self._go_on(self._reads.end(), self._waited_s)
        return 0, None
