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
from dataclasses import replace

from aiohttp import web

from kvshare.engine import (
    Delta,
    Event,
    FinishReason,
    GeneratingEngine,
    GenerationRequest,
    Started,
)
from kvshare.errors import EngineError, KVShareError
from proxy.connection import probed
from proxy.context import SERVER
from proxy.errors import to_reply
from proxy.generate.answer_writer import AnswerWriter, Usage
from proxy.request_log import RECORD, RequestFailure, RequestRecord, log_failure
from proxy.sse import HEADERS, dump


class AnswerRun:
    """
    The deltas of all `requests`, choices numbered through: request i's choice c is `i * n + c`.

    `open` raises what the engine refuses, `deltas` what fails later.
    """

    def __init__(
        self, engine: GeneratingEngine, requests: Sequence[GenerationRequest], record: RequestRecord
    ) -> None:
        """`record` gets the reports of the requests."""
        self._engine = engine
        self._requests = requests
        self._record = record
        self._queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue()  # None: all have finished
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[AnswerRun]:
        """
        Run the requests. Inside, each is admitted and planned; none runs after leaving, which frees the
        engine's slots.
        """
        tasks = [
            asyncio.create_task(self._generate(number, request), name=f"generate {request.request_id}")
            for number, request in enumerate(self._requests)
        ]
        try:
            await self._started
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
            if number not in self._record.finished:
                raise EngineError("The engine ended without its last event.")
        except Exception as exc:  # noqa: BLE001  raised again, translated, in `open` or where the deltas are read
            error = exc
            if not isinstance(exc, KVShareError):
                error = EngineError("The engine failed while it computed this answer.")
                error.__cause__ = exc
            if not self._started.done():
                self._started.set_exception(error)
            self._queue.put_nowait(error)

    def _take(self, number: int, event: Event) -> None:
        if isinstance(event, Delta):
            offset = number * self._requests[0].sampling.n
            self._queue.put_nowait(replace(event, choice=offset + event.choice) if offset else event)
            return
        self._record.reports[number] = event.report
        if isinstance(event, Started):
            if len(self._record.reports) == len(self._requests) and not self._started.done():
                self._started.set_result(None)
        else:
            self._record.finished[number] = event
            if len(self._record.finished) == len(self._requests):
                self._queue.put_nowait(None)


async def answer(request: web.Request, engine: GeneratingEngine, writer: AnswerWriter) -> web.StreamResponse:
    """
    Run the requests of an answer to their end. Leaving early, by an error or a disconnect, frees the slots.

    From the first byte of a stream on, an error is an event.
    """
    record, stream = request[RECORD], web.StreamResponse(headers=HEADERS)
    record.mode = writer.requests[0].mode
    run = AnswerRun(engine, writer.requests, record)
    try:
        try:
            async with request.app[SERVER].lifecycle.running(), run.open():
                if not writer.is_stream:
                    return await _collect(run, writer, record)
                await stream.prepare(request)
                with probed(request, stream, writer.keep_alive, is_between=lambda: True):
                    await _send(request, stream, run, writer)
                await stream.write_eof()  # a drain waits for the last byte, too
                return stream
        except ConnectionError:
            raise
        except Exception as exc:
            if not stream.prepared:
                raise
            record.finish_reason = "error"
            reply = to_reply(exc)
            record.failure = RequestFailure.of(exc, reply)
            if reply.status >= 500:
                log_failure(record.request_id, exc)
            await stream.write(writer.broken_off(reply))
        await stream.write_eof()
    except ConnectionError:
        record.disconnected = True
    return stream


async def _collect(run: AnswerRun, writer: AnswerWriter, record: RequestRecord) -> web.Response:
    async for delta in run.deltas():
        if delta is not None:
            record.note(delta)
            writer.collect(delta)
    document = writer.whole(_usage(record))
    _note_calls(record, writer)
    return web.Response(body=dump(document), content_type="application/json")


async def _send(
    request: web.Request, stream: web.StreamResponse, run: AnswerRun, writer: AnswerWriter
) -> None:
    record = request[RECORD]
    await stream.write(writer.opening(_usage(record)))
    async for delta in run.deltas(heartbeat_s=request.app[SERVER].settings.server.keep_alive_s):
        if delta is None:
            await stream.write(writer.keep_alive)
        else:
            record.note(delta)
            await stream.write(writer.more(delta))
    _note_calls(record, writer)
    await stream.write(writer.closing(_usage(record)))


def _note_calls(record: RequestRecord, writer: AnswerWriter) -> None:
    """The engine, which sees text only, says of an answer that calls tools that it stopped."""
    if writer.calls_tools and record.finish_reason == FinishReason.STOP:
        record.finish_reason = "tool_calls"


def _usage(record: RequestRecord) -> Usage:
    return Usage(record.total, record.num_completion_tokens or 0)
