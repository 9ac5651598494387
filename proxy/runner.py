"""aiohttp's runner of an application, with our own answer to what never becomes a request."""

from __future__ import annotations

import logging

from aiohttp import web

from kvshare.errors import ErrorCode
from proxy.errors import ErrorReply

SERVER_NAME = "kvshare"  # in the header Server; aiohttp's default would show its version and Python's

log = logging.getLogger("proxy.middleware")  # where requests are logged

# aiohttp logs malformed requests with their bytes, keys included. What handlers raise the middleware logs.
_aiohttp_log = logging.getLogger("proxy.aiohttp")
_aiohttp_log.setLevel(logging.CRITICAL + 1)


class FrontRunner(web.AppRunner):
    """
    Runs an application on sockets.

    handler_cancellation: a client that goes away must not keep its slot.
    """

    def __init__(self, app: web.Application, *, shutdown_timeout: float) -> None:
        super().__init__(app, handler_cancellation=True, shutdown_timeout=shutdown_timeout, access_log=None)

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _Server(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            access_log=None,
            logger=_aiohttp_log,
        )


class _Server(web.Server):
    """Makes a protocol for each connection."""

    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)


class _Protocol(web.RequestHandler):
    """One connection."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Bytes that are no HTTP request. aiohttp would answer as text, with these bytes in it."""
        super().handle_error(request, status, exc, message)  # closes the connection where an answer has begun
        text = "The server failed to answer; see its log."
        log.info(
            "request - key=- client=%s %d: bytes that are no HTTP request", request.remote or "-", status
        )
        if status < 500:
            text = "This is no HTTP request: expected HTTP/1.1, and lines and headers of at most 8 KB each."
        code = ErrorCode.BAD_REQUEST if status < 500 else ErrorCode.INTERNAL_ERROR
        response = ErrorReply(status, code, text).to_response()
        response.headers["Server"] = SERVER_NAME
        response.force_close()
        return response
