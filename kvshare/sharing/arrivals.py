"""
Prompts that are being computed. A similar prompt waits until one is stored and copies from it.

    eight similar prompts arrive together    the first is computed in full; seven wait, then copy
    no similar prompt is being computed      nothing waits

The length of a wait is estimated in tokens, not in seconds, because a fresh or busy server has no reliable
rate. A prompt waits for another one that has at most about half as many tokens left to compute as a full
prefill of the waiting prompt has. That number is multiplied by the number of prompts that compute or wait,
since they share the engine. vLLM does not report what is left: there a wait ends when the prefill should have
been over long ago.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from delta_tree import TokenIds, common_prefix_length, kgram_hashes
from kvshare.requests import SharingMode

ResultT = TypeVar("ResultT")

# The share of a prefill that a wait may take: a half, with a margin for prompts of slightly different
# lengths.
_SHARE_OF_PREFILL = 0.55
_STORING_S = 1.0  # how long to wait for a computed prompt to be stored
_LOOK_S = 0.1
_SAMPLES = 2048  # k-grams of a prompt that are compared: the comparison runs on the event loop
_WORTH = 0.5  # share of the tokens to compute that a wait must save


@dataclass(eq=False)
class Arrival:
    """A prompt that is planned and not stored yet, so that no other prompt can copy from it."""

    namespace: str
    token_ids: TokenIds
    kgram: int
    over: asyncio.Event = field(default_factory=asyncio.Event)  # set when it is stored or will never be
    is_stored: bool = False
    remaining: Callable[[], int] = field(init=False)  # how many of its tokens are not computed yet

    def __post_init__(self) -> None:
        self.remaining = lambda: len(self.token_ids)

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint64]:
        """Return the distinct hashes of its k-grams, ascending."""
        return np.unique(kgram_hashes(self.token_ids, self.kgram))


@dataclass(frozen=True, slots=True)
class Waited(Generic[ResultT]):
    """The last result of looking a prompt up, and how long it waited for similar ones."""

    result: ResultT
    seconds: float | None  # None: it did not wait


class Arrivals:
    """The prompts that one engine computes now. All methods run on its event loop."""

    def __init__(self, *, min_run: int) -> None:
        self._min_run = min_run
        self._arrivals: dict[str, list[Arrival]] = {}  # by namespace, in order of arrival
        self._num_waiting = 0

    def __len__(self) -> int:
        return sum(map(len, self._arrivals.values()))

    def begin(self, namespace: str, token_ids: TokenIds) -> Arrival:
        """Register a prompt that is now computed and later stored. The caller must call `end`."""
        arrival = Arrival(namespace, token_ids, self._min_run)
        self._arrivals.setdefault(namespace, []).append(arrival)
        return arrival

    def end(self, arrival: Arrival, *, stored: bool = False) -> None:
        """Wake the prompts that wait: this one is `stored`, or will never be. Idempotent."""
        if not arrival.over.is_set():
            arrival.is_stored = stored
            arrival.remaining = lambda: 0  # drops the reference to the engine's task
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
        look_up: Callable[[], Awaitable[ResultT]],
        num_reused: Callable[[ResultT], int],
    ) -> Waited[ResultT]:
        """
        Look a prompt up, and wait for similar prompts as long as a wait promises more reuse.

        `namespaces`: where it is looked up; one for each engine that may get it.
        `num_reused`: how many of its tokens a result reuses.
        """
        result, began, has_waited = await look_up(), time.monotonic(), False
        if self._arrivals.keys().isdisjoint(namespaces):
            return Waited(result, None)  # no prompt to wait for
        reused = num_reused(result)
        self._num_waiting += 1
        try:
            asked: set[Arrival] = set()
            while other := self._worth_waiting_for(namespaces, token_ids, mode, reused, without=asked):
                has_waited = True
                asked.add(other)
                if not await self._is_over(other):
                    self.end(other)  # no other prompt should wait for it either
                    continue
                result, before = await look_up(), reused
                reused = num_reused(result)
                if other.is_stored and reused <= before:
                    break  # the gate refused it, and would refuse similar ones
        finally:
            self._num_waiting -= 1
        return Waited(result, time.monotonic() - began if has_waited else None)

    async def _is_over(self, other: Arrival) -> bool:
        """Wait until a prompt is stored. Returns false if it is computed and storing takes too long."""
        computed_at: float | None = None
        while not other.over.is_set():
            if not other.remaining():
                computed_at = computed_at or time.monotonic()
                if time.monotonic() - computed_at > _STORING_S:
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
        num_reused: int,
        *,
        without: Collection[Arrival],
    ) -> Arrival | None:
        """Return the prompt with most to copy, if a wait for it saves over half of what must be computed."""
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

        def num_shared(other: Arrival) -> int:
            if mode is SharingMode.EXACT:
                return common_prefix_length(other.token_ids, token_ids)
            if not len(own) or not len(other.hashes):
                return 0
            at = np.minimum(other.hashes.searchsorted(own), len(other.hashes) - 1)
            return round(len(token_ids) * float((other.hashes[at] == own).mean()))

        to_copy = {other: num_shared(other) for other in others}
        best = max(others, key=to_copy.__getitem__)  # the first of equal ones
        saves_enough = to_copy[best] - num_reused > _WORTH * (len(token_ids) - num_reused)
        return best if saves_enough else None
