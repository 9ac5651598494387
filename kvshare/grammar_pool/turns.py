"""
Decides whose grammar is compiled now, and who waits.

A key has one grammar compiled at a time, and at most four waiting. So a key whose grammars never compile
delays no other key's. All keys together have at most eight: beyond that the one under way for longest gives
way.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from kvshare.errors import OverloadedError

MAX_WAITING = 4  # of one key, after the one that compiles
MAX_COMPILING = 8  # of all keys
TOO_LATE = "earlier schemas of this key took all of the time; try again later"
_OTHERS_COMPILE = "schemas of other keys took all of the time; try again later"
_SHARE_S = 1.0  # of compiling, before one gives way to others


@dataclass(eq=False)
class CompileTurn:
    """One grammar that is compiled."""

    began: float = field(default_factory=time.monotonic)
    gives_way: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(eq=False)
class _Queue:
    """The grammars of one key."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    waiting: Counter[bytes] = field(default_factory=Counter)  # the prompts of one request have one grammar


class CompileTurns:
    """Who compiles now, and who waits."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._compiling: list[CompileTurn] = []
        self._left = asyncio.Event()  # set whenever one has compiled

    @asynccontextmanager
    async def turn(self, key: str, message: bytes, deadline: float) -> AsyncIterator[CompileTurn]:
        """Wait for the turn of this key. Raises OverloadedError if too many wait, or none comes in time."""
        queue = self._queues.setdefault(key, _Queue())
        if queue.lock.locked() and len(queue.waiting) >= MAX_WAITING and message not in queue.waiting:
            raise OverloadedError(
                f"{len(queue.waiting)} schemas of this key are waiting to be compiled; try again later"
            )
        queue.waiting[message] += 1
        try:
            async with asyncio.timeout_at(deadline):
                await queue.lock.acquire()
        except TimeoutError:
            raise OverloadedError(TOO_LATE) from None
        finally:
            queue.waiting[message] -= 1
            queue.waiting += Counter()  # without those that do not wait any longer
            self._forget(key, queue)
        try:
            try:
                async with asyncio.timeout_at(deadline):
                    await self._make_room()
            except TimeoutError:
                raise OverloadedError(_OTHERS_COMPILE) from None
            turn = CompileTurn()
            self._compiling.append(turn)
            try:
                yield turn
            finally:
                self._compiling.remove(turn)
                self._left.set()
        finally:
            queue.lock.release()
            self._forget(key, queue)

    def _forget(self, key: str, queue: _Queue) -> None:
        if not queue.waiting and not queue.lock.locked():
            self._queues.pop(key, None)

    async def _make_room(self) -> None:
        """Wait until one compiles less than may; the one under way for longest gives way after its share."""
        while len(self._compiling) >= MAX_COMPILING:
            longest = self._compiling[0]
            left = longest.began + _SHARE_S - time.monotonic()
            if left <= 0:
                longest.gives_way.set()
            self._left.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(max(left, 0.05)):
                    await self._left.wait()
