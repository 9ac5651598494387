"""What both engines have in common: parts that are open between start and stop, and their runtime."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any, Generic, Protocol, TypeVar

from kvshare.engines.base import Engine
from kvshare.errors import ShuttingDownError
from kvshare.runtime import Runtime
from kvshare.sharing.pipeline import Sharing


class Server(Protocol):
    """The parts of a started engine."""

    @property
    def runtime(self) -> Runtime[Any]: ...


ServerT = TypeVar("ServerT", bound=Server)


class ServedEngine(Engine, Generic[ServerT]):
    """An engine whose `start` opens a server, in `_opened`, and sets `_running` to it."""

    def __init__(self) -> None:
        self._running: ServerT | None = None
        self._opened = AsyncExitStack()

    @property
    def server(self) -> ServerT:
        """The parts of the engine. Raises ShuttingDownError before start and after stop."""
        if self._running is None:
            raise ShuttingDownError("the engine is not running")
        return self._running

    @property
    def sharing(self) -> Sharing:
        """The sharing core, for benchmarks and tests."""
        return self.server.runtime.sharing

    async def stop(self) -> None:
        self._running = None
        await self._opened.aclose()

    async def inspect(self, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return await self.server.runtime.inspect(what, arguments)
