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

from aiohttp import web

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
from proxy.context import GENERATING, SERVER
from proxy.errors import to_reply
from proxy.openai.bodies import GenerationBody
from proxy.openai.responses import Response, usage_object
from proxy.openai.sse import EventStream, dump
from proxy.request_log import RECORD, RequestRecord, combine, log_failure


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


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request that is understood: what to run, and how its answer looks."""

    requests: Sequence[GenerationRequest]
    shape: Response
    body: GenerationBody


async def answer(request: web.Request, job: Job) -> web.StreamResponse:
    """Run the job to its end. Leaving early, by an error or a disconnect, frees the engine's slots."""
    server, record = request.app[SERVER], request[RECORD]
    record.mode = job.requests[0].mode
    run = Run(request.app[GENERATING], job.requests)
    with server.lifecycle.running(run):
        try:
            async with run.open():
                await run.wait_started()
                if job.body.stream:
                    return await _stream(request, job, run)
                return await _collect(job, run, record)
        finally:
            record.reports = tuple(run.reports.values())
            record.finished = tuple(run.finished.values())


async def _collect(job: Job, run: Run, record: RequestRecord) -> web.Response:
    async for event in run.events():
        if isinstance(event, Delta):
            record.note(event)
            job.shape.collect(event)
    job.shape.check_ended()
    return web.Response(body=dump(job.shape.response(_usage(run))), content_type="application/json")


async def _stream(request: web.Request, job: Job, run: Run) -> web.StreamResponse:
    """From the first byte on, an error is an event, and `[DONE]` comes in any case."""
    record = request[RECORD]
    stream = EventStream(request)
    try:
        await stream.begin()
        try:
            await _send_events(request, job, run, stream)
        except ConnectionError:
            raise
        except Exception as exc:  # noqa: BLE001  the status is out: the client gets the error as a frame
            record.finish_reason = "error"
            reply = to_reply(exc)
            if reply.status >= 500:
                log_failure(record.request_id, exc)
            await stream.send(reply.body)
        await stream.finish()
    except ConnectionError:
        record.disconnected = True
    return stream.response


async def _send_events(request: web.Request, job: Job, run: Run, stream: EventStream) -> None:
    record, shape = request[RECORD], job.shape
    await stream.send(*shape.opening())
    heartbeat_s = request.app[SERVER].settings.server.keep_alive_s
    async for event in run.events(heartbeat_s=heartbeat_s):
        if isinstance(event, Delta):
            record.note(event)
            await stream.send(*shape.chunks(event))
        else:
            await stream.keep_alive()
    shape.check_ended()
    if job.body.include_usage:
        await stream.send(shape.usage_chunk(_usage(run)))


def _usage(run: Run) -> dict[str, object]:
    num_completion_tokens = sum(entry.num_completion_tokens for entry in run.finished.values())
    return usage_object(combine(tuple(run.reports.values())), num_completion_tokens=num_completion_tokens)
