"""What goes on after an answer is out: owned tasks, awaited at stop, and by whoever asks next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from kvshare.safe_logging import classes_and_places

log = logging.getLogger(__name__)


class Background:
    """Tasks of one event loop. The next request of a namespace can wait for what was spawned for it."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], str | None] = {}  # with the namespace each is for

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], *, namespace: str | None = None) -> None:
        """Run `work`, owned here; what it raises is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = namespace
        task.add_done_callback(self._done)

    async def caught_up(self, namespace: str, *, timeout_s: float) -> None:
        """Wait for what was spawned for a namespace so far, at most `timeout_s`."""
        if pending := {task for task, owner in self._tasks.items() if owner == namespace}:
            await asyncio.wait(pending, timeout=timeout_s)

    async def settle(self) -> None:
        """Wait until nothing runs."""
        await self.below(1)

    async def cancel(self) -> None:
        """End everything that runs."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def below(self, limit: int) -> None:
        """Wait until fewer than `limit` tasks run: what they hold on to stays bounded."""
        while len(self._tasks) >= limit:
            await asyncio.wait(set(self._tasks), return_when=asyncio.FIRST_COMPLETED)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("work after an answer failed: %s", classes_and_places(exc))
