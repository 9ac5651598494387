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
from functools import partial
from time import perf_counter

from aiohttp import web

from kvshare.engine import Delta, Event, FinishReason, GeneratingEngine, GenerationRequest, Started
from kvshare.errors import EngineError, KVShareError
from kvshare.requests import StoredPrompt
from proxy.connection import probed
from proxy.context import SERVER
from proxy.errors import to_reply
from proxy.generate.answer_writer import AnswerWriter, Usage
from proxy.request_history import stored_documents
from proxy.request_log import log_failure
from proxy.request_record import RECORD, AnswerRecord, RequestFailure, RequestRecord
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
        self._last_token: dict[int, float] = {}  # when each choice got its last one
        self.stored = [StoredPrompt() for _ in requests]  # updated by the engine, also after the answer
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
            if running := [task for task in tasks if not task.done()]:
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

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

    def note(self, delta: Delta) -> None:
        """Record the time of a delta, and the end of its choice."""
        answer = self._record.answer
        if delta.finish_reason is not None:
            answer.ended_as = delta.finish_reason
        if not delta.num_tokens:
            return
        now = perf_counter()
        if answer.first_token_s is None:
            answer.first_token_s = now - self._record.started
        before = self._last_token.get(delta.choice)
        if before is not None:
            answer.token_gaps_s.append((now - before) / delta.num_tokens)
        self._last_token[delta.choice] = now

    async def _generate(self, number: int, request: GenerationRequest) -> None:
        try:
            await self._engine.generate(request, lambda event: self._take(number, event))
            if number not in self._record.answer.finished:
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
        self._record.answer.reports[number] = event.report
        if isinstance(event, Started):
            self.stored[number] = event.stored
            if len(self._record.answer.reports) == len(self._requests) and not self._started.done():
                self._started.set_result(None)
        else:
            self._record.answer.finished[number] = event
            if len(self._record.answer.finished) == len(self._requests):
                self._queue.put_nowait(None)


async def answer(request: web.Request, engine: GeneratingEngine, writer: AnswerWriter) -> web.StreamResponse:
    """
    Run the requests of an answer to their end. Leaving early, by an error or a disconnect, frees the slots.

    From the first byte of a stream on, an error is an event.
    """
    record, stream = request[RECORD], web.StreamResponse(headers=HEADERS)
    run = AnswerRun(engine, writer.requests, record)
    record.preparation.mode = writer.requests[0].mode
    record.preparation.executed = partial(stored_documents, run.stored)
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
            record.answer.ended_as = "error"
            reply = to_reply(exc)
            record.answer.broken_off = RequestFailure.of(exc, reply)
            if reply.status >= 500:
                log_failure(record.request_id, exc)
            await stream.write(writer.broken_off(reply))
        await stream.write_eof()
    except ConnectionError:
        record.answer.disconnected = True
    return stream


async def _collect(run: AnswerRun, writer: AnswerWriter, record: RequestRecord) -> web.Response:
    async for delta in run.deltas():
        if delta is not None:
            run.note(delta)
            writer.collect(delta)
    document = writer.whole(_usage(record))
    _note_calls(record.answer, writer)
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
            run.note(delta)
            await stream.write(writer.more(delta))
    _note_calls(record.answer, writer)
    await stream.write(writer.closing(_usage(record)))


def _note_calls(answer: AnswerRecord, writer: AnswerWriter) -> None:
    """The engine, which sees text only, says of an answer that calls tools that it stopped."""
    if writer.calls_tools and answer.ended_as == FinishReason.STOP:
        answer.ended_as = "tool_calls"


def _usage(record: RequestRecord) -> Usage:
    return Usage(record.answer.total, record.answer.num_completion_tokens or 0)
