"""
Loads the engine while the server listens, and drains before it stops.

    starting -> ready -> draining
            \\-> failed ->/

Owns the task that starts the engine and knows which generations run, so that a drain can wait for them and
then end what is left with an error instead of a broken connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

from kvshare.engine import Engine
from kvshare.errors import ErrorCode, ShuttingDownError
from proxy.errors import HttpError

log = logging.getLogger(__name__)


class Phase(StrEnum):
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    DRAINING = "draining"


class Lifecycle:
    """One per server. All methods run on the server's event loop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.phase = Phase.STARTING
        self.is_engine_up = False  # whether it has started, also while the server drains
        self._running: set[asyncio.Timeout] = set()  # a scope around each generation, to end it
        self._idle = asyncio.Event()
        self._idle.set()
        self._starting: asyncio.Task[None] | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check_accepting(self) -> None:
        """Raises ShuttingDownError while draining, HttpError 503 before the engine is up."""
        if self.phase is Phase.DRAINING:
            raise ShuttingDownError("The server is shutting down.")
        if self.phase is not Phase.READY:
            detail = (
                "the model is being loaded" if self.phase is Phase.STARTING else "the engine did not start"
            )
            message = f"The server cannot answer yet: {detail}."
            raise HttpError(503, ErrorCode.NOT_READY, message, {"Retry-After": "1"})

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """
        Counts what is inside as running, so that a drain waits for it.

        Raises as `check_accepting` does, and ShuttingDownError where a drain cancels what is inside.
        """
        self.check_accepting()
        scope = asyncio.timeout(None)
        self._running.add(scope)
        self._idle.clear()
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            raise ShuttingDownError("The server is shutting down; the answer is incomplete.") from None
        finally:
            self._running.discard(scope)
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def engine_running(self) -> AsyncIterator[None]:
        """Start the engine in the background, stop it at the end, even one that is still starting."""
        self._starting = asyncio.create_task(self._start(), name="start the engine")
        try:
            yield
        finally:
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
            await self._engine.stop()

    async def _start(self) -> None:
        try:
            await self._engine.start()
        except Exception:
            self.phase = Phase.FAILED
            raise
        self.is_engine_up = True
        if self.phase is Phase.STARTING:
            self.phase = Phase.READY
        log.info("engine ready: model %s", self._engine.card.model_id)

    async def wait_started(self) -> None:
        """Returns when the engine is up. Raises what its start raised."""
        assert self._starting is not None, "called while the engine runs"
        await asyncio.shield(self._starting)

    async def drain(self, timeout_s: float) -> None:
        """Refuse what is new, let what runs finish for `timeout_s`, end the rest with ShuttingDownError."""
        self.phase = Phase.DRAINING
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            for scope in self._running:
                if not scope.expired():
                    scope.reschedule(asyncio.get_running_loop().time())
