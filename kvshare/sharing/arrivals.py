"""
Prompts that are being computed: who resembles one waits for it, instead of computing the same again.

    eight forms at once      the first is computed in full, the others wait until it is stored, and copy
    nobody like it           nothing is waited for

Waits are measured in tokens that the engine computes, not in seconds: how fast it is, a fresh or a busy
server does not know. One waits if what the other still has to compute is at most about half of the own full
prefill, as that would run beside all others that compute or wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from delta_tree import TokenIds, common_prefix_length, kgram_hashes
from kvshare.requests import SharingMode
from kvshare.sharing.pipeline import Lookup

_SHARE_OF_PREFILL = (
    0.55  # that a wait may take: half, and two prompts of nearly one length wait for each other
)
_STORING_S = 1.0  # what is computed is stored by then, or not waited for any longer
_LOOK_S = 0.1
_SAMPLES = 2048  # of a prompt's k-grams, that are looked for in another's: this runs on the event loop
_WORTH = 0.5  # of what would be computed now: less is not waited for


@dataclass(eq=False)
class Arrival:
    """A prompt between its plan and the moment when others can copy from it."""

    namespace: str
    token_ids: TokenIds
    kgram: int
    over: asyncio.Event = field(default_factory=asyncio.Event)  # it is stored, or never will be
    is_stored: bool = False
    remaining: Callable[[], int] = field(init=False)  # tokens that are still to be computed of it

    def __post_init__(self) -> None:
        self.remaining = lambda: len(self.token_ids)

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

    def end(self, arrival: Arrival, *, stored: bool = False) -> None:
        """Others find it by a lookup now, or never. Idempotent."""
        if not arrival.over.is_set():
            arrival.is_stored = stored
            arrival.remaining = lambda: 0  # lets go of the engine's task
            arrival.over.set()
            others = self._arrivals[arrival.namespace]
            others.remove(arrival)
            if not others:
                del self._arrivals[arrival.namespace]

    async def waited(
        self,
        namespaces: Collection[str],
        token_ids: TokenIds,
        mode: SharingMode,
        look_up: Callable[[], Awaitable[Lookup]],
    ) -> Lookup:
        """
        What a prompt finds, after it has waited for one like it where that promises more.

        `namespaces` are those it is looked up in: one an engine that it may be sent to.
        """
        lookup, began, has_waited = await look_up(), self._clock(), False
        self._num_waiting += 1
        try:
            asked: set[Arrival] = set()
            while other := self._worth_waiting_for(namespaces, token_ids, mode, lookup, without=asked):
                has_waited = True
                asked.add(other)
                if not await self._is_over(other):
                    self.end(other)  # nor need the next one wait for it
                    continue
                before, lookup = _num_reused(lookup, token_ids), await look_up()
                if other.is_stored and _num_reused(lookup, token_ids) <= before:
                    break  # refused, as any other like it would be
        finally:
            self._num_waiting -= 1
        return lookup.after_waiting(self._clock() - began) if has_waited else lookup

    async def _is_over(self, other: Arrival) -> bool:
        """Waits for a prompt; false where it is computed and storing takes too long."""
        computed_at: float | None = None
        while not other.over.is_set():
            if not other.remaining():
                computed_at = computed_at or self._clock()
                if self._clock() - computed_at > _STORING_S:
                    return False
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await other.over.wait()
        return True

    def _worth_waiting_for(
        self,
        namespaces: Collection[str],
        token_ids: TokenIds,
        mode: SharingMode,
        lookup: Lookup,
        *,
        without: Collection[Arrival],
    ) -> Arrival | None:
        """The one that would give most, if that is at least half of what would be computed now."""
        longest = _SHARE_OF_PREFILL * len(token_ids) * (len(self) + self._num_waiting)
        others = [
            other
            for namespace in namespaces
            for other in self._arrivals.get(namespace, ())
            if other not in without and other.remaining() <= longest
        ]
        if not others:
            return None
        own = kgram_hashes(token_ids, self._min_run)
        own = own[:: max(1, len(own) // _SAMPLES)]

        def given(other: Arrival) -> int:
            if mode is SharingMode.EXACT:
                return common_prefix_length(other.token_ids, token_ids)
            if not len(own) or not len(other.hashes):
                return 0
            at = np.minimum(other.hashes.searchsorted(own), len(other.hashes) - 1)
            return round(len(token_ids) * float((other.hashes[at] == own).mean()))

        most, best = max(((given(other), -place) for place, other in enumerate(others)), default=(0, 0))
        num_reused = _num_reused(lookup, token_ids)
        if most - num_reused <= _WORTH * (len(token_ids) - num_reused):
            return None
        return others[-best]


def _num_reused(lookup: Lookup, token_ids: TokenIds) -> int:
    return lookup.report(len(token_ids)).num_cached
