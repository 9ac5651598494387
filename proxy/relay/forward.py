"""
Forwards one request: sends it to a replica, or to another one if that does not answer; relays the answer.

Status and body are vLLM's, byte for byte, and so are the headers, except hop-by-hop and CORS ones. Only
errors on the routes of Anthropic's API are put into its words (`anthropic_errors.py`). If vLLM breaks off, an
error event is appended: otherwise the client would take the end of the stream for success.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

import aiohttp
from aiohttp import web

from kvshare.errors import EngineError, ErrorCode, KVShareError, UpstreamError
from kvshare.fleet.replica import Replica
from kvshare.fleet.routed_request import RoutedRequest
from kvshare.fleet.router import Router
from kvshare.safe_logging import class_and_place
from kvshare.vllm_protocol.messages import PROMPT_KEY
from proxy.azure import openai_url
from proxy.connection import probed
from proxy.context import SERVER
from proxy.errors import HttpError, is_anthropic, to_reply
from proxy.relay.answer_size import AnswerSize
from proxy.relay.anthropic_errors import MAX_BODY, ErrorEvents, reply_of
from proxy.relay.dialects import Dialect
from proxy.relay.sanitize import (
    headers_to_client,
    headers_to_upstream,
    takes_salt,
    upstream_path,
    with_members,
)
from proxy.request_record import RECORD, RequestFailure
from proxy.sse import KEEP_ALIVE, dump

log = logging.getLogger(__name__)

_MAX_ERROR = 16 * 1024  # bytes of vLLM's own error that are read
_WORD = re.compile(r"[\w.\[\]-]{1,60}")
_TYPE = re.compile(r"[A-Za-z_]{1,40}(?: [A-Za-z]{1,20}){0,3}")  # also the phrase of a status: "Bad Request"


@dataclass(eq=False)
class RelayedRequest:
    """One request on its way to vLLM and back."""

    request: web.Request
    router: Router
    routed: RoutedRequest
    body: bytes  # sanitized
    is_json: bool = True
    dialect: Dialect | None = None  # None: the route does not generate
    _answer: web.StreamResponse | None = field(default=None, init=False)  # set once its status line is sent
    _beginning: bytes = field(default=b"", init=False)  # of an error, or of a stream until its first token
    _size: AnswerSize = field(default_factory=AnswerSize, init=False)
    _last: bytes = field(default=b"\n\n", init=False)  # the last chunk that was written

    async def forward(self) -> web.StreamResponse:
        """
        Plan and send the request, and relay the answer until it ends. A drain of the server waits for that.

        If the client disconnects, the connection to vLLM is closed, and vLLM aborts the request.
        """
        try:
            async with self.request.app[SERVER].lifecycle.running():
                with self.router.controlled(self.routed):
                    replica = await self.router.route(self.routed)
                    self._note_stages(self.routed.progress.lookup_seconds)
                    return await self._try_replicas(replica)
        except KVShareError as exc:
            return await self._break_off(exc)

    async def _try_replicas(self, replica: Replica) -> web.StreamResponse:
        """Try replicas until one takes the request, and relay its answer. Only then the client gets bytes."""
        routed, tried = self.routed, [replica]
        while True:
            routed.progress.has_failed = False
            with self.router.sending(routed, replica):
                try:
                    response = await self._send(replica)
                except UpstreamError as exc:
                    routed.progress.has_failed = True
                    log.warning("replica %s did not take a request: %s", replica.name, class_and_place(exc))
                else:
                    try:
                        return await self._pass_on(response)
                    finally:
                        response.close()
            replica = self.router.reroute(routed, tried)
            tried.append(replica)

    async def _send(self, replica: Replica) -> aiohttp.ClientResponse:
        began = perf_counter()
        request, record, report = self.request, self.request[RECORD], self.routed.report
        record.answer.reports = {} if report is None else {0: report}
        headers = headers_to_upstream(request.headers)
        headers["X-Request-Id"] = record.request_id
        if record.trace is not None:  # vLLM's spans are below ours
            headers["traceparent"] = record.trace.header
        headers.update(replica.headers)
        path = upstream_path(openai_url(request).raw_path_qs)
        added: dict[str, bytes] = {}  # the salt and the ticket of this try
        if self.is_json and takes_salt(path):
            added["cache_salt"] = dump(self.routed.salt)
        if (params := self.routed.transfer_params) is not None:
            rendered = self.routed.rendered_for(replica.vllm.url)
            given_back = {} if rendered is None else {PROMPT_KEY: rendered}
            added["kv_transfer_params"] = with_members(dump(params), given_back)
        body = with_members(self.body, added)
        self._note_stages({"ticket": perf_counter() - began})
        try:
            return await replica.vllm.send(request.method, path, headers=headers, body=body)
        except TimeoutError as exc:
            read_timeout_s = request.app[SERVER].settings.vllm.read_timeout_s
            message = f"The model server said nothing for {read_timeout_s:g} s."
            raise HttpError(504, ErrorCode.UPSTREAM_TIMEOUT, message) from exc

    def _note_stages(self, seconds: Mapping[str, float]) -> None:
        if self.dialect is not None:  # other routes prepare nothing
            self.request[RECORD].preparation.stage_seconds.update(seconds)

    async def _pass_on(self, response: aiohttp.ClientResponse) -> web.StreamResponse:
        self.routed.progress.has_failed = response.status >= 400
        if self.routed.progress.has_failed and is_anthropic(self.request.path):
            return await self._pass_on_error(response)
        answer = web.StreamResponse(
            status=response.status, reason=response.reason, headers=headers_to_client(response.headers)
        )
        try:
            await answer.prepare(self.request)
            self._answer = answer
            with probed(self.request, answer, KEEP_ALIVE, is_between=lambda: self._is_between_events):
                await self._pass_on_body(response, answer)
            if self.routed.progress.has_failed:
                self.request[RECORD].answer.broken_off = _failure_of(self._beginning)
            await answer.write_eof()
            self.routed.progress.num_output = self._size.num_tokens
            self.routed.progress.is_complete = not self.routed.progress.has_failed
        except ConnectionError:
            self.request[RECORD].answer.disconnected = True
        return answer

    async def _pass_on_body(self, response: aiohttp.ClientResponse, answer: web.StreamResponse) -> None:
        """Relay the body of an answer. Raises EngineError if vLLM breaks it off."""
        is_messages = self._is_stream and is_anthropic(self.request.path)
        events = ErrorEvents(self.request[RECORD].request_id) if is_messages else None
        while chunk := await self._next_chunk(response):
            self._note_chunk(chunk)
            await self._write(answer, chunk if events is None else events.feed(chunk))
        if events is not None:
            await self._write(answer, events.flush())

    async def _write(self, answer: web.StreamResponse, chunk: bytes) -> None:
        if chunk:
            self._last = chunk
            await answer.write(chunk)

    async def _next_chunk(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            return await response.content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            name = self.routed.replica
            log.warning("replica %s broke off an answer: %s", name, class_and_place(exc))
            raise EngineError("The model server broke off this answer.") from exc

    async def _pass_on_error(self, response: aiohttp.ClientResponse) -> web.StreamResponse:
        """Relay an error of vLLM in the words of Anthropic's API."""
        raw = b""
        while len(raw) < MAX_BODY and (chunk := await self._next_chunk(response)):
            raw += chunk
        record = self.request[RECORD]
        record.answer.broken_off = _failure_of(raw)
        answer = reply_of(response.status, raw).to_response(anthropic_id=record.request_id)
        for name, value in headers_to_client(response.headers).items():
            if name.lower() not in ("content-type", "content-length", "content-encoding"):
                answer.headers.add(name, value)
        return answer

    def _note_chunk(self, chunk: bytes) -> None:
        record, progress = self.request[RECORD], self.routed.progress
        self._size.feed(chunk, is_stream=self._is_stream)
        if progress.has_failed:
            self._beginning = (self._beginning + chunk)[:_MAX_ERROR]
        if record.answer.first_token_s is not None or progress.has_failed or not self._has_token(chunk):
            return
        record.answer.first_token_s = perf_counter() - record.started
        self.routed.note_prefilled()
        if self._is_stream:
            progress.prefill_s = perf_counter() - progress.sent_at
            self._note_stages({"engine": progress.prefill_s})

    def _has_token(self, chunk: bytes) -> bool:
        """Return whether the answer has a token by now; see `Dialect.first_token`."""
        if self.dialect is None or not self.dialect.first_token or not self._is_stream:
            return True
        self._beginning += chunk
        return self.dialect.first_token in self._beginning

    @property
    def _is_between_events(self) -> bool:
        return self._is_stream and self._last.endswith((b"\n\n", b"\r\n\r\n"))

    @property
    def _is_stream(self) -> bool:
        return self._answer is not None and self._answer.content_type == "text/event-stream"

    async def _break_off(self, error: KVShareError) -> web.StreamResponse:
        """
        Report to the client that its answer is incomplete, in the stream or by closing the connection. If the
        answer has not begun, raise the error instead.
        """
        if self._answer is None:
            raise error
        record, reply = self.request[RECORD], to_reply(error)
        record.answer.ended_as = "error"
        record.answer.broken_off = RequestFailure.of(error, reply)
        try:
            if self.dialect is not None and self._is_stream:
                await self._answer.write(self.dialect.broken_off(reply, record.request_id))
                await self._answer.write_eof()
            elif self.request.transport is not None:
                self.request.transport.abort()
        except ConnectionError:
            record.answer.disconnected = True
        return self._answer


def _failure_of(body: bytes) -> RequestFailure:
    """Describe an error of vLLM for the log: only type and parameter, as its message may quote the prompt."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    error = document.get("error", document) if isinstance(document, dict) else None
    given = error if isinstance(error, dict) else {}
    words = {name: word for name, word in given.items() if isinstance(word, str) and _WORD.fullmatch(word)}
    named = given.get("type")
    kind = named if isinstance(named, str) and _TYPE.fullmatch(named) else "upstream_error"
    message = f"vLLM's own answer, of type {kind!r}; what it says is not logged"
    return RequestFailure(kind.replace(" ", "_"), message, words.get("param"))
