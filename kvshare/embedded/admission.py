"""
Decides which requests run and which wait for a slot, so that each tenant gets its share of both.

A free slot goes to the first waiting request of the tenant with the fewest running requests. When the queue
is full, the tenant with most waiting requests gives up its last one for a request of another tenant.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvshare.errors import OverloadedError


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    tenant: str
    admitted: asyncio.Future[None]


class Admission:
    """Limits how many requests run and how many wait. All methods run on the event loop."""

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.num_running = 0
        self.max_waiting = max_waiting
        self._max_running = max_running
        self._running: Counter[str] = Counter()
        self._queue: list[_Waiting] = []  # in order of arrival

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @asynccontextmanager
    async def slot(self, tenant: str = "") -> AsyncIterator[None]:
        """Hold one slot. Raises OverloadedError if none is free and the queue has no room for this tenant."""
        await self._take(tenant)
        try:
            yield
        finally:
            self._leave(tenant)

    async def _take(self, tenant: str) -> None:
        if self.num_running < self._max_running and not self._queue:
            self._enter(tenant)
            return
        self._make_room(tenant)
        waiting = _Waiting(tenant, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        try:
            await waiting.admitted
        except BaseException:
            if waiting in self._queue:
                self._queue.remove(waiting)
            elif _is_in(waiting):
                self._leave(tenant)  # it was cancelled after it got its slot
            raise

    def _make_room(self, tenant: str) -> None:
        """Make room if the queue is full. Raises OverloadedError if no tenant waits with more requests."""
        if len(self._queue) < self.max_waiting:
            return
        counts = Counter(waiting.tenant for waiting in self._queue)
        most = max(counts, key=counts.__getitem__, default=tenant)
        if counts[most] <= counts[tenant] + 1:
            raise OverloadedError("the queue of requests is full; try again later")
        last = next(waiting for waiting in reversed(self._queue) if waiting.tenant == most)
        self._queue.remove(last)
        if not last.admitted.done():  # if it is done, it was cancelled just now
            last.admitted.set_exception(
                OverloadedError(
                    f"{counts[most]} requests of this tenant wait, and others need room; try again later"
                )
            )

    def _enter(self, tenant: str) -> None:
        self.num_running += 1
        self._running[tenant] += 1

    def _leave(self, tenant: str) -> None:
        self.num_running -= 1
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        while self._queue and self.num_running < self._max_running:
            following = min(self._queue, key=lambda waiting: self._running[waiting.tenant])
            self._queue.remove(following)
            if not following.admitted.done():  # if it is done, it was cancelled just now
                self._enter(following.tenant)
                following.admitted.set_result(None)


def _is_in(waiting: _Waiting) -> bool:
    done = waiting.admitted
    return done.done() and not done.cancelled() and done.exception() is None
