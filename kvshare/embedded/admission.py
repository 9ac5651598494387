"""Which requests run, and which wait for a slot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvshare.errors import OverloadedError


class Admission:
    """Limits how many requests run and how many wait; they start in order of arrival."""

    def __init__(self, *, max_running: int, max_waiting: int) -> None:
        self.num_running = 0
        self.num_waiting = 0
        self._max_waiting = max_waiting
        self._slots = asyncio.Semaphore(max_running)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold one slot. Raises OverloadedError if none is free and the queue is full."""
        if self._slots.locked() and self.num_waiting >= self._max_waiting:
            raise OverloadedError(f"{self.num_waiting} requests are waiting already; try again later")
        self.num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.num_waiting -= 1
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._slots.release()
