"""
A client's connection below its requests: serves clients that wait for `100 Continue`, and clients that close
their sending side and still read. The answer to bytes that are not a request is in `malformed_requests.py`.

aiohttp's own protocol answers in text, sends `100 Continue` before a handler has seen the request, and treats
a client that has closed its sending side as gone. The private parts of aiohttp that this uses were tried on
version 3.14.
"""

from __future__ import annotations

import asyncio
import logging
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.web_protocol import _ErrInfo

from kvshare.addresses import SERVER_NAME
from kvshare.errors import ErrorCode
from proxy.errors import ErrorReply, HttpError
from proxy.malformed_requests import MAX_FIELD, MAX_LINE, fault_of, refusal_of

_request_log = logging.getLogger("proxy.middleware")  # where requests are logged
# aiohttp logs malformed requests with their bytes, keys included. What handlers raise the middleware logs.
_aiohttp_log = logging.getLogger("proxy.aiohttp")
_aiohttp_log.setLevel(logging.CRITICAL + 1)

_STREAM_PROBE: web.RequestKey[Callable[[], bytes]] = web.RequestKey("stream_probe")
_EXPECTATION: web.RequestKey[str] = web.RequestKey("expectation", str)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_MAX_QUOTED = 40  # characters of a header
_WATCH_S = 0.1  # how often a half-closed connection is looked at
_PROBE_LOOKS = 50  # looks from one probe to the next
_PATIENT_LOOKS = 5  # and before a whole answer to the first: quick ones come without


async def send_continue(request: web.Request) -> None:
    """Tell a client that waits to send its body. Called once everything else of the request was accepted."""
    if request.get(_EXPECTATION) and request.version >= HttpVersion11 and not request.content.is_eof():
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0  # as aiohttp does: it is not of the answer


@contextmanager
def probed(
    request: web.Request, stream: web.StreamResponse, comment: bytes, *, is_between: Callable[[], bool]
) -> Iterator[None]:
    """
    While inside, `comment` may be put into a stream to find out whether its reader is there.

    `is_between`: whether the stream is between two events now.
    """
    if stream.headers.get("Transfer-Encoding") == "chunked":
        comment = b"%x\r\n%b\r\n" % (len(comment), comment)
    has_end = "Content-Length" in stream.headers  # there is no room in it
    request[_STREAM_PROBE] = lambda: comment if is_between() and not has_end else b""
    try:
        yield
    finally:
        del request[_STREAM_PROBE]


def check_expectation(request: web.Request) -> None:
    """Raises HttpError 417 for an expectation other than `100-continue`, the only one that HTTP has."""
    expectation = request.get(_EXPECTATION, "100-continue")
    if expectation.lower() != "100-continue":
        message = f"Invalid header Expect: expected 100-continue, got '{expectation[:_MAX_QUOTED]}'."
        raise HttpError(417, ErrorCode.BAD_REQUEST, message)


class FrontRunner(web.AppRunner):
    """
    Runs an application on sockets.

    handler_cancellation: a client that goes away must not keep its slot.
    """

    def __init__(self, app: web.Application, *, shutdown_timeout: float) -> None:
        super().__init__(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout, access_log=None)

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        make_request = server.request_factory

        def without_expectation(message: Any, *rest: Any) -> web.BaseRequest:
            """aiohttp would answer it before any handler."""
            expectation = message.headers.get("Expect")
            if not expectation:
                return make_request(message, *rest)
            headers = message.headers.copy()
            del headers["Expect"]
            request = make_request(message._replace(headers=type(message.headers)(headers)), *rest)
            request[_EXPECTATION] = expectation
            return request

        return _Server(
            server.request_handler,
            request_factory=without_expectation,
            handler_cancellation=server.handler_cancellation,
            access_log=None,
            logger=_aiohttp_log,
        )


class _Server(web.Server):
    """Makes a protocol for each connection."""

    def __call__(self) -> web.RequestHandler:
        limits = {"max_line_size": MAX_LINE, "max_field_size": MAX_FIELD}
        return _Protocol(self, loop=self._loop, auto_decompress=False, **limits, **self._kwargs)


class _Protocol(web.RequestHandler):
    """
    A connection. A client that has sent all may close its sending side ("half-close") and gets its answers.
    A client that has gone closes in the same way, and differs only by rejecting what it is sent. So before an
    answer, and within a stream, the server sends probes, which clients skip.
    """

    __slots__ = ("_is_half_closed", "_last_body", "_num_looks", "_watch")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_half_closed = False
        self._last_body: StreamReader | None = None  # of the last request that has come
        self._num_looks = 0
        self._watch: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._messages and isinstance(self._messages[-1][0], _ErrInfo):
            error = self._messages[-1][0]
            self._end_body(fault_of(error.exc, error.message or ""))
        elif self._messages:
            self._last_body = self._messages[-1][1]

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's says less than asyncio's
        """Return whether the connection stays open."""
        if self._is_idle:
            return False
        if not self._is_half_closed:
            self._is_half_closed = True
            self._end_body("the client closed the connection's sending side before its end")
            self._look()
        return True

    @property
    def _is_idle(self) -> bool:
        return self._waiter is not None and not self._messages

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        is_last = self._is_half_closed and not self._messages
        if is_last:  # no request can follow
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        if is_last or (self._is_half_closed and not self._messages):
            self.close()
        return finished

    def _end_body(self, problem: str) -> None:
        """A request that waits for the rest of its body learns that it does not come."""
        body = self._last_body
        if body is not None and not body.is_eof() and body.exception() is None:
            body.set_exception(web.RequestPayloadError(problem))

    def _look(self) -> None:
        """Drop a half-closed connection that the client has closed altogether; look again soon."""
        if self.transport is None:
            return
        if self._is_idle or _is_reset(self.transport):
            self.transport.abort()
            return
        if self._current_request is not None:
            self._probe(self._current_request, self.transport)
            self._num_looks += 1
        self._watch = self._loop.call_later(_WATCH_S, self._look)

    def _probe(self, request: web.BaseRequest, transport: asyncio.Transport) -> None:
        if request.writer.output_size:  # the answer has begun
            probe = request.get(_STREAM_PROBE) if isinstance(request, web.Request) else None
            if probe is not None and self._num_looks % _PROBE_LOOKS == 0:
                transport.write(probe())
        elif self._num_looks % _PROBE_LOOKS == _PATIENT_LOOKS and request.version >= HttpVersion11:
            transport.write(_CONTINUE)  # RFC 9110, 15.2.1: a client that did not ask for it discards it

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer bytes that are not an HTTP request. aiohttp would answer as text, with these bytes in it."""
        super().handle_error(request, status, exc, message)  # closes the connection where an answer has begun
        reply = ErrorReply(500, ErrorCode.INTERNAL_ERROR, "The server failed to answer; see its log.")
        said = "bytes that are not an HTTP request"
        if status < 500:
            reply = refusal_of(exc, message or "")
            said = reply.message
        client = request.remote or "-"
        fields = {"key": "-", "status": reply.status, "client": client, "error_message": said}
        _request_log.info(
            'request - key=- client=%s %d "%s"', client, reply.status, said, extra={"fields": fields}
        )
        response = reply.to_response()
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        return response


def _is_reset(transport: asyncio.Transport) -> bool:
    """Return whether the other side has rejected what it was sent, because its socket is gone."""
    if not hasattr(select, "poll"):
        return False  # on Windows: a write that fails says so
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), 0)
    return bool(poll.poll(0))
