"""
Forwards one request: sends it to a replica, or to another if that does not answer, and passes its answer on.

Status, headers and every byte of the body are vLLM's. Only an answer that breaks off gets an end from here,
as a stream that merely ends looks like success.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import aiohttp
from aiohttp import web

from kvshare.errors import EngineError, NoReplicaError, UpstreamError
from kvshare.fleet.client import HttpUpstream
from kvshare.fleet.dispatch import Dispatch, Flight, Order
from kvshare.fleet.engine import VllmEngine
from proxy.context import SERVER
from proxy.errors import to_reply, upstream_timed_out
from proxy.relay.json_members import JsonMembers
from proxy.relay.sanitize import headers_to_client, headers_to_upstream, sanitized, takes_salt
from proxy.request_log import RECORD, class_and_place
from proxy.sse import DONE, frame

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Outgoing:
    """What is to be relayed; `form` is a body that is not JSON, or none at all."""

    path: str  # as the client wrote it, with its query
    order: Order
    members: JsonMembers | None = None
    form: bytes = b""
    ends_with_done: bool = False  # its streams are OpenAI's

    def body(self, dispatch: Dispatch) -> bytes:
        """The client's bytes with the salt and the ticket of a dispatch."""
        if self.members is None:
            return self.form
        added: dict[str, Any] = {}
        if takes_salt(self.path):
            added["cache_salt"] = dispatch.salt
        if dispatch.ticket is not None:
            added["kv_transfer_params"] = _transfer_params(dispatch)
        return sanitized(self.members, added)


def _transfer_params(dispatch: Dispatch) -> Mapping[str, Any]:
    """
    The ticket; for approximate plans also the number of reused tokens, in vLLM's own parameter. Without it
    vLLM would count all tokens of the connector as cached, those that the connector computed included.
    """
    ticket, report = dispatch.ticket, dispatch.report
    assert ticket is not None, "asked where there is one"
    params: dict[str, Any] = {"kvshare": ticket.to_json()}
    if not ticket.is_exact and report is not None:
        params |= {"do_remote_prefill": True, "remote_prefill_cached_tokens": report.num_cached}
    return params


async def forward(request: web.Request, engine: VllmEngine, outgoing: Outgoing) -> web.StreamResponse:
    """Plan and send a request, pass its answer on. A drain waits for it, and aborts it in the end."""
    relayed = RelayedRequest(request, engine, outgoing)
    with request.app[SERVER].lifecycle.running(relayed):
        return await relayed.run()


class RelayedRequest:
    """A request on its way. `abort` ends it from outside, with an error that is sent to the client."""

    def __init__(self, request: web.Request, engine: VllmEngine, outgoing: Outgoing) -> None:
        self._request = request
        self._engine = engine
        self._outgoing = outgoing
        self._scope = asyncio.timeout(None)
        self._aborted: Exception | None = None
        self._answer: web.StreamResponse | None = None  # once its status line is out

    def abort(self, error: Exception) -> None:
        """End the request with `error`."""
        self._aborted = error
        with suppress(RuntimeError):  # it has ended already
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def run(self) -> web.StreamResponse:
        """Plan and forward until the answer ends. Leaving early closes the connection, and vLLM aborts."""
        try:
            async with self._scope:
                return await self._try_replicas(await self._engine.dispatch(self._outgoing.order))
        except TimeoutError:
            if self._aborted is None:
                raise
            return await self._break_off(self._aborted)

    async def _try_replicas(self, dispatch: Dispatch) -> web.StreamResponse:
        """Try replicas until one takes the request; nothing has been sent to the client before."""
        tried = set()
        while True:
            tried.add(dispatch.replica.name)
            with self._engine.running(dispatch) as flight:
                try:
                    response = await self._send(dispatch)
                except UpstreamError as exc:
                    flight.was_refused = True
                    name = dispatch.replica.name
                    log.warning("replica %s did not take a request: %s", name, class_and_place(exc))
                    self._engine.note_unreachable(dispatch.replica)
                else:
                    try:
                        return await self._pass_on(response, flight)
                    finally:
                        response.close()
            others = [entry for entry in self._engine.fleet.serving() if entry.name not in tried]
            if not others:
                raise NoReplicaError
            dispatch = dispatch.elsewhere(others[0], self._outgoing.order)

    async def _send(self, dispatch: Dispatch) -> aiohttp.ClientResponse:
        upstream, record = dispatch.replica.upstream, self._request[RECORD]
        assert isinstance(upstream, HttpUpstream), "the proxy connects replicas by HTTP only"
        record.reports = () if dispatch.report is None else (dispatch.report,)
        headers = headers_to_upstream(self._request.headers)
        headers["X-Request-Id"] = record.request_id
        try:
            return await upstream.send(
                self._request.method,
                self._outgoing.path,
                headers=headers,
                body=self._outgoing.body(dispatch),
            )
        except TimeoutError as exc:
            raise upstream_timed_out(self._request.app[SERVER].settings.vllm.read_timeout_s) from exc

    async def _pass_on(self, response: aiohttp.ClientResponse, flight: Flight) -> web.StreamResponse:
        flight.was_refused = response.status >= 400
        answer = web.StreamResponse(
            status=response.status, reason=response.reason, headers=headers_to_client(response.headers)
        )
        try:
            await answer.prepare(self._request)
            self._answer = answer
            while True:
                try:
                    chunk = await response.content.readany()
                except (aiohttp.ClientError, TimeoutError, OSError) as exc:
                    name = flight.dispatch.replica.name
                    log.warning("replica %s broke off an answer: %s", name, class_and_place(exc))
                    return await self._break_off(EngineError("The model server broke off this answer."))
                if not chunk:
                    break
                self._note_chunk(flight)
                await answer.write(chunk)
            await answer.write_eof()
        except ConnectionError:
            self._request[RECORD].disconnected = True
        return answer

    def _note_chunk(self, flight: Flight) -> None:
        record = self._request[RECORD]
        if record.first_token_s is not None or flight.was_refused:
            return
        record.first_token_s = perf_counter() - record.started
        flight.note_first_byte(streamed=self._is_stream)

    @property
    def _is_stream(self) -> bool:
        return self._answer is not None and self._answer.content_type == "text/event-stream"

    async def _break_off(self, error: Exception) -> web.StreamResponse:
        """Report to the client that its answer is incomplete, in the stream or by closing the connection."""
        if self._answer is None:
            raise error
        self._request[RECORD].finish_reason = "error"
        try:
            if self._outgoing.ends_with_done and self._is_stream:
                # The blank line ends what may be half a frame.
                await self._answer.write(b"\n\n" + frame(to_reply(error).body) + DONE)
                await self._answer.write_eof()
            elif self._request.transport is not None:
                self._request.transport.abort()
        except ConnectionError:
            self._request[RECORD].disconnected = True
        return self._answer
