"""What goes on after an answer is out: owned tasks, awaited at stop, and by whoever asks next."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


class Background:
    """Tasks of one event loop. The next request of a namespace can wait for what was spawned for it."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: dict[str, set[asyncio.Task[None]]] = {}

    def spawn(self, work: Coroutine[Any, Any, None], *, namespace: str | None = None) -> None:
        """Run `work`, owned here. Its exceptions are its own to log."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if namespace is not None:
            self._pending.setdefault(namespace, set()).add(task)
            task.add_done_callback(lambda done: self._forget(namespace, done))

    async def caught_up(self, namespace: str, *, timeout_s: float) -> None:
        """Wait for what was spawned for a namespace so far, at most `timeout_s`."""
        if pending := self._pending.get(namespace):
            await asyncio.wait(set(pending), timeout=timeout_s)

    async def settle(self) -> None:
        """Wait until nothing runs."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _forget(self, namespace: str, task: asyncio.Task[None]) -> None:
        pending = self._pending[namespace]
        pending.discard(task)
        if not pending:
            del self._pending[namespace]
