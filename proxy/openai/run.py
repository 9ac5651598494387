"""
Runs a request in the engine and writes its answer, whole or as a stream.

Each prompt of a request has a task that runs the engine's `generate`; what they emit meets in one queue. A
client that reads slowly does not slow the engine down: the completion's length bounds what waits for it. Plan
and admission come before the first byte, so that what the engine refuses has its real status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from aiohttp import web

from kvshare.engines.base import Delta, Event, Finished, GeneratingEngine, GenerationRequest, Started
from kvshare.errors import EngineError, KVShareError
from kvshare.requests import SharingReport
from proxy.context import SERVER
from proxy.errors import to_reply
from proxy.openai.bodies import GenerationBody
from proxy.openai.responses import Response, usage_object
from proxy.request_log import RECORD, RequestRecord, combine, log_failure
from proxy.sse import EventStream, dump


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """A request that is understood: what to run, and how its answer looks."""

    requests: Sequence[GenerationRequest]
    response: Response
    body: GenerationBody


class Run:
    """
    The deltas of all `requests`, choices numbered through: request i's choice c is `i * n + c`.

    `wait_started` comes first and raises what the engine refuses; `deltas` raises what fails later.
    """

    def __init__(self, engine: GeneratingEngine, requests: Sequence[GenerationRequest]) -> None:
        self._engine = engine
        self._requests = requests
        self._queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()  # None: all have finished
        self._started = asyncio.Event()  # set when all requests have started, or one never will
        self._refusal: Exception | None = None
        self._reports: dict[int, SharingReport] = {}
        self._finished: dict[int, Finished] = {}

    @property
    def reports(self) -> tuple[SharingReport, ...]:
        return tuple(self._reports.values())

    @property
    def finished(self) -> tuple[Finished, ...]:
        return tuple(self._finished.values())

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Run]:
        """Run the requests; none runs after leaving, which frees the engine's slots."""
        tasks = [
            asyncio.create_task(self._generate(number, request), name=f"generate {request.request_id}")
            for number, request in enumerate(self._requests)
        ]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_started(self) -> None:
        """Returns when every request is admitted and planned."""
        await self._started.wait()
        if self._refusal is not None:
            raise self._refusal

    async def deltas(self, *, heartbeat_s: float | None = None) -> AsyncIterator[Delta | None]:
        """The deltas of all requests until all have finished; None after each `heartbeat_s` of silence."""
        while True:
            try:
                async with asyncio.timeout(heartbeat_s):
                    item = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            if item is None:
                return
            if isinstance(item, Exception):
                raise item
            yield item

    async def _generate(self, number: int, request: GenerationRequest) -> None:
        try:
            await self._engine.generate(request, lambda event: self._take(number, event))
            if number not in self._finished:
                raise EngineError("The engine ended without its last event.")
        except KVShareError as exc:
            self.abort(exc)
        except Exception as exc:  # noqa: BLE001  raised again, translated, where the deltas are read
            error = EngineError("The engine failed while it computed this answer.")
            error.__cause__ = exc
            self.abort(error)

    def _take(self, number: int, event: Event) -> None:
        if isinstance(event, Delta):
            offset = number * self._requests[0].sampling.n
            self._queue.put_nowait(replace(event, choice=offset + event.choice) if offset else event)
            return
        self._reports[number] = event.report
        if isinstance(event, Started):
            if len(self._reports) == len(self._requests):
                self._started.set()
        else:
            self._finished[number] = event
            if len(self._finished) == len(self._requests):
                self._queue.put_nowait(None)

    def abort(self, error: Exception) -> None:
        """End `deltas` with `error`, or `wait_started`, where that is waited for."""
        if not self._started.is_set():
            self._refusal = error
            self._started.set()
        self._queue.put_nowait(error)


async def answer(request: web.Request, engine: GeneratingEngine, job: Job) -> web.StreamResponse:
    """Run the job to its end. Leaving early, by an error or a disconnect, frees the engine's slots."""
    server, record = request.app[SERVER], request[RECORD]
    record.mode = job.requests[0].mode
    run = Run(engine, job.requests)
    with server.lifecycle.running(run):
        try:
            async with run.open():
                await run.wait_started()
                if job.body.stream:
                    return await _stream(request, job, run)
                return await _collect(job, run, record)
        finally:
            record.reports = run.reports
            record.finished = run.finished


async def _collect(job: Job, run: Run, record: RequestRecord) -> web.Response:
    async for delta in run.deltas():
        if delta is not None:
            record.note(delta)
            job.response.collect(delta)
    job.response.check_ended()
    return web.Response(body=dump(job.response.whole(_usage(run))), content_type="application/json")


async def _stream(request: web.Request, job: Job, run: Run) -> web.StreamResponse:
    """From the first byte on, an error is an event, and `[DONE]` comes in any case."""
    record = request[RECORD]
    stream = EventStream(request)
    try:
        await stream.begin()
        try:
            await _send_chunks(request, job, run, stream)
        except ConnectionError:
            raise
        except Exception as exc:  # noqa: BLE001  the status is out: the client gets the error as an event
            record.finish_reason = "error"
            reply = to_reply(exc)
            if reply.status >= 500:
                log_failure(record.request_id, exc)
            await stream.send(reply.body)
        await stream.finish()
    except ConnectionError:
        record.disconnected = True
    return stream.response


async def _send_chunks(request: web.Request, job: Job, run: Run, stream: EventStream) -> None:
    record, response = request[RECORD], job.response
    await stream.send(*response.opening())
    async for delta in run.deltas(heartbeat_s=request.app[SERVER].settings.server.keep_alive_s):
        if delta is None:
            await stream.keep_alive()
        else:
            record.note(delta)
            await stream.send(*response.chunks(delta))
    response.check_ended()
    if job.body.include_usage:
        await stream.send(response.usage_chunk(_usage(run)))


def _usage(run: Run) -> dict[str, object]:
    num_completion_tokens = sum(entry.num_completion_tokens for entry in run.finished)
    return usage_object(combine(run.reports), num_completion_tokens=num_completion_tokens)
