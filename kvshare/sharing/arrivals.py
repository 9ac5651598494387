"""
Prompts that are being computed: who resembles one waits for it, instead of computing the same again.

    eight forms at once      the first is computed in full, the others wait until it is stored, and copy
    nobody like it           nothing is waited for

A wait ends when the other is stored, has failed, or has taken half as long as the own full prefill would if
all that compute and wait computed side by side; what storing takes comes on top.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from delta_tree import TokenIds, common_prefix_length, kgram_hashes
from kvshare.requests import SharingMode
from kvshare.sharing.pipeline import Lookup

_SHARE_OF_PREFILL = 0.5  # that a wait may take
_STORING_S, _STORING_SHARE = 0.25, 0.25  # at most so long, and such a part of the prefill
_SAMPLES = 2048  # of a prompt's k-grams, that are looked for in another's: this runs on the event loop
_WORTH = 0.5  # of what would be computed now: less is not waited for


@dataclass(eq=False)
class Arrival:
    """A prompt between its plan and the moment when others can copy from it."""

    namespace: str
    token_ids: TokenIds
    kgram: int
    over: asyncio.Event = field(default_factory=asyncio.Event)  # it is stored, or never will be

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """Of all its k-grams, each once."""
        return np.unique(kgram_hashes(self.token_ids, self.kgram))


class Arrivals:
    """Of one engine. All methods run on its event loop."""

    def __init__(self, *, min_run: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._min_run = min_run
        self._clock = clock
        self._arrivals: dict[str, list[Arrival]] = {}  # by namespace, in order of arrival
        self._num_waiting = 0

    def __len__(self) -> int:
        return sum(map(len, self._arrivals.values()))

    def begin(self, namespace: str, token_ids: TokenIds) -> Arrival:
        """It is computed from now on, and will be stored. `end` must follow."""
        arrival = Arrival(namespace, token_ids, self._min_run)
        self._arrivals.setdefault(namespace, []).append(arrival)
        return arrival

    def end(self, arrival: Arrival) -> None:
        """Others find it by a lookup now, or never. Idempotent."""
        if not arrival.over.is_set():
            arrival.over.set()
            others = self._arrivals[arrival.namespace]
            others.remove(arrival)
            if not others:
                del self._arrivals[arrival.namespace]

    async def waited(
        self,
        namespace: str,
        token_ids: TokenIds,
        mode: SharingMode,
        look_up: Callable[[], Awaitable[Lookup]],
        *,
        prefill_s: float,
    ) -> Lookup:
        """
        What a prompt finds, after it has waited for one like it where that promises more.

        `prefill_s`: what computing all of it takes on an idle engine.
        """
        lookup, waited_s, began = await look_up(), 0.0, self._clock()
        self._num_waiting += 1
        try:
            side_by_side = len(self) + self._num_waiting
            limit_s = _SHARE_OF_PREFILL * prefill_s * side_by_side
            limit_s += min(_STORING_S, _STORING_SHARE * prefill_s)
            while waited_s < limit_s and (
                other := self._worth_waiting_for(namespace, token_ids, mode, lookup)
            ):
                with suppress(TimeoutError):
                    async with asyncio.timeout(limit_s - waited_s):
                        await other.over.wait()
                waited_s = self._clock() - began
                if other.over.is_set():
                    lookup = await look_up()
        finally:
            self._num_waiting -= 1
        return lookup if not waited_s else lookup.after_waiting(waited_s)

    def _worth_waiting_for(
        self, namespace: str, token_ids: TokenIds, mode: SharingMode, lookup: Lookup
    ) -> Arrival | None:
        """The one that would give most, if that is at least half of what would be computed now."""
        others = self._arrivals.get(namespace, ())
        if not others:
            return None
        own = kgram_hashes(token_ids, self._min_run)
        own = own[:: max(1, len(own) // _SAMPLES)]
        report = lookup.report(len(token_ids))

        def given(other: Arrival) -> int:
            if mode is SharingMode.EXACT:
                return common_prefix_length(other.token_ids, token_ids)
            if not len(own) or not len(other.hashes):
                return 0
            at = np.minimum(other.hashes.searchsorted(own), len(other.hashes) - 1)
            return round(len(token_ids) * float((other.hashes[at] == own).mean()))

        most, best = max(((given(other), -place) for place, other in enumerate(others)), default=(0, 0))
        num_reused = report.num_exact + report.num_copied
        if most - num_reused <= _WORTH * (len(token_ids) - num_reused):
            return None
        return others[-best]
