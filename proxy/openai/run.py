"""
Runs engine generations as one stream of events: several prompts at once, a heartbeat while nothing comes.

A pump task per prompt iterates the engine's generator; leaving `Run.open` cancels the pumps and
closes the generators, which frees the engine's slots. A client that reads slowly does not slow the engine
down: what is waiting for it is bounded by the completion's length.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace

from kvshare.engines.base import (
    Delta,
    Event,
    Finished,
    GeneratingEngine,
    GenerationRequest,
    SharingReport,
    Started,
)
from kvshare.errors import EngineError, KVShareError


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Nothing came for a while; the connection should show that it lives."""


@dataclass(frozen=True, slots=True)
class _Arrival:
    number: int  # of the request
    event: Event | Exception


class Run:
    """
    The events of all `requests`, choices numbered through: request i's choice c is `i * n + c`.

    `wait_started` comes first and raises what the engine refuses; `events` raises what fails later.
    """

    def __init__(self, engine: GeneratingEngine, requests: Sequence[GenerationRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._arrivals: asyncio.Queue[_Arrival] = asyncio.Queue()
        self._early: deque[_Arrival] = deque()  # deltas of one prompt that came before another was started
        self.reports: dict[int, SharingReport] = {}
        self.finished: dict[int, Finished] = {}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Run]:
        """Run the requests; none runs after leaving."""
        pumps = [
            asyncio.create_task(self._pump(number, request), name=f"pump {request.request_id}")
            for number, request in enumerate(self._requests)
        ]
        try:
            yield self
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    def abort(self, error: Exception) -> None:
        """End `events` with `error`, from outside."""
        self._arrivals.put_nowait(_Arrival(-1, error))

    async def _pump(self, number: int, request: GenerationRequest) -> None:
        try:
            async with aclosing(self._engine.generate(request)) as events:
                event: Event | None = None
                async for event in events:
                    self._arrivals.put_nowait(_Arrival(number, event))
                if not isinstance(event, Finished):
                    raise EngineError("The engine ended without its last event.")
        except KVShareError as exc:
            self._arrivals.put_nowait(_Arrival(number, exc))
        except Exception as exc:  # noqa: BLE001  raised again, translated, where the events are read
            error = EngineError("The engine failed while it computed this answer.")
            error.__cause__ = exc
            self._arrivals.put_nowait(_Arrival(number, error))

    async def wait_started(self) -> None:
        """Returns when every request is admitted and planned."""
        while len(self.reports) < len(self._requests):
            arrival = await self._arrivals.get()
            if isinstance(arrival.event, Started):
                self.reports[arrival.number] = arrival.event.report
            elif isinstance(arrival.event, Exception):
                raise arrival.event
            else:
                self._early.append(arrival)

    async def events(self, *, heartbeat_s: float | None = None) -> AsyncIterator[Delta | Heartbeat]:
        """
        The deltas of all requests until all have finished, and a Heartbeat per `heartbeat_s` of silence.
        """
        while len(self.finished) < len(self._requests):
            try:
                async with asyncio.timeout(None if self._early else heartbeat_s):
                    arrival = self._early.popleft() if self._early else await self._arrivals.get()
            except TimeoutError:
                yield Heartbeat()
                continue
            event = arrival.event
            if isinstance(event, Exception):
                raise event
            if isinstance(event, Delta):
                offset = arrival.number * self._requests[0].sampling.n
                yield replace(event, choice=offset + event.choice) if offset else event
            elif isinstance(event, Finished):
                self.finished[arrival.number] = event
                self.reports[arrival.number] = event.report
