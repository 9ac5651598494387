"""
Answers a request that is understood: runs it in the engine and writes what comes, whole or streamed.

Plan and admission come before the first byte, so that what the engine refuses keeps its real status.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aiohttp import web

from kvshare.engines.base import Delta, GenerationRequest
from proxy.context import GENERATING, SERVER
from proxy.errors import to_reply
from proxy.middleware import log_failure
from proxy.openai.bodies import GenerationBody
from proxy.openai.responses import Response
from proxy.openai.run import Run
from proxy.openai.sse import EventStream, dump
from proxy.openai.usage import combine, usage_object
from proxy.request_log import RECORD, RequestRecord


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
