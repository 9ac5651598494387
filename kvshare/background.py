"""Tasks that run while requests are served, such as storing a prompt. Stopping awaits or cancels them."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from kvshare.safe_logging import classes_and_places

log = logging.getLogger(__name__)

_MAX_EMBEDDING = 16  # prompts waiting to be embedded, which hold text only
_BEHIND_S = 60.0  # so long after the last prompt that was not embedded, embedding counts as behind


class Background:
    """Tasks of one event loop. A request can wait for the earlier tasks of its namespace."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], str | None] = {}  # with the namespace of each

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], *, namespace: str | None = None) -> None:
        """Run `work` as a task; log an exception that it raises."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = namespace
        task.add_done_callback(self._done)

    async def caught_up(self, namespace: str, *, timeout_s: float) -> None:
        """Wait for the running tasks of a namespace, at most `timeout_s`."""
        if pending := {task for task, owner in self._tasks.items() if owner == namespace}:
            await asyncio.wait(pending, timeout=timeout_s)

    async def settle(self) -> None:
        await self.wait_below(1)

    async def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def wait_below(self, limit: int) -> None:
        """Wait until fewer than `limit` tasks run, which bounds the memory that they hold."""
        while len(self._tasks) >= limit:
            await asyncio.wait(set(self._tasks), return_when=asyncio.FIRST_COMPLETED)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a background task failed, answers are not affected: %s", classes_and_places(exc))


class EmbeddingBacklog(Background):
    """Stored prompts that wait to be embedded: at most some, as they hold their text."""

    def __init__(self) -> None:
        super().__init__()
        self._refused_at = -math.inf

    @property
    def is_behind(self) -> bool:
        """Return whether the backlog has refused a prompt within the last minute."""
        return time.monotonic() < self._refused_at + _BEHIND_S

    def has_room(self) -> bool:
        if len(self) < _MAX_EMBEDDING:
            return True
        self._refused_at = time.monotonic()
        return False


@asynccontextmanager
async def repeated(act: Callable[[], Awaitable[None]], *, every_s: float) -> AsyncIterator[None]:
    """Call `act` now and then while inside. One that fails is logged, and none follows."""

    async def act_now_and_then() -> None:
        while True:
            await asyncio.sleep(every_s)
            await act()

    acting = Background()
    acting.spawn(act_now_and_then())
    try:
        yield
    finally:
        await acting.cancel()


@asynccontextmanager
async def saved_often(save: Callable[[], None], *, every_s: float) -> AsyncIterator[None]:
    """Write what outlives a restart now and then, and at the end, in a thread: never on the event loop."""
    alone = threading.Lock()  # the last one may come while another one still writes

    def save_alone() -> None:
        with alone:
            save()

    async def save_now_and_then() -> None:
        while True:
            await asyncio.sleep(every_s)
            await asyncio.to_thread(save_alone)

    saving = Background()
    saving.spawn(save_now_and_then())
    try:
        yield
    finally:
        await saving.cancel()
        await asyncio.to_thread(save_alone)
