"""
Every error as HTTP: one table from error class to status, type and code, and one body shape.

* KVShareError
  - HttpError        what HTTP itself refuses: 401, 403, 404, 405, 408, 413, 415, 503 while loading
  x the rest         see `kvshare.errors`; the table below gives each its status

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`, always with all four keys. On the
routes of Anthropic's API it is theirs: `{"type": "error", "error": {"type", "message"}, "request_id"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from aiohttp import web

from kvshare.errors import (
    EngineError,
    ErrorCode,
    KVShareError,
    ModelNotFoundError,
    NoReplicaError,
    OverloadedError,
    RequestError,
    ShuttingDownError,
    UpstreamError,
)

_MAX_QUOTED = 40  # characters of what a client sent, in a message
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    **_TYPES,
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_ANTHROPIC_ROUTES = "/v1/messages"  # and what is below it
_MODELS = "/v1/models"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as it goes out, as a response of its own or as the last event of a stream."""

    status: int
    code: ErrorCode | None = None
    message: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    param: str | None = None

    @property
    def type(self) -> str:
        """OpenAI's word for the kind of error."""
        return _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def anthropic_body(self, request_id: str) -> dict[str, Any]:
        """`request_id`: what the answer's headers say."""
        default = "api_error" if self.status >= 500 else "invalid_request_error"
        error_type = _ANTHROPIC_TYPES.get(self.status, default)
        error = {"type": error_type, "message": self.message}
        return {"type": "error", "error": error, "request_id": request_id}

    def to_response(self, *, anthropic_id: str | None = None) -> web.Response:
        """Write the error in OpenAI's format; with a request's id in Anthropic's, which contains the id."""
        body = self.body if anthropic_id is None else self.anthropic_body(anthropic_id)
        return web.Response(
            status=self.status,
            body=json.dumps(body).encode(),
            content_type="application/json",
            headers=self.headers,
        )


def is_anthropic(path: str) -> bool:
    """Return whether clients of this path speak Anthropic's API. The route need not exist."""
    return path == _ANTHROPIC_ROUTES or path.startswith(f"{_ANTHROPIC_ROUTES}/")


def speaks_anthropic(request: web.Request) -> bool:
    """Return whether Anthropic's format is used: by the path, and for the list of models by a header."""
    is_list = request.path == _MODELS or request.path.startswith(f"{_MODELS}/")
    return is_anthropic(request.path) or (is_list and "anthropic-version" in request.headers)


class HttpError(KVShareError):
    """A refusal that concerns HTTP alone; carries the whole reply."""

    def __init__(
        self, status: int, code: ErrorCode, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.reply = ErrorReply(status, code, message, headers or {})


def forbidden(message: str) -> HttpError:
    return HttpError(403, ErrorCode.PERMISSION_DENIED, message)


def too_large(max_bytes: int, which: str = "") -> HttpError:
    """`which` size of the body is too large, such as "after decompression"; may be empty."""
    words = f"The request body is larger than this server accepts{which and f' {which}'}"
    return HttpError(413, ErrorCode.REQUEST_TOO_LARGE, f"{words}: expected at most {max_bytes} bytes.")


# The first row whose class matches counts, so a class stands before its parents.
_TABLE: tuple[tuple[type[KVShareError], ErrorReply], ...] = (
    (ModelNotFoundError, ErrorReply(404)),
    (RequestError, ErrorReply(400)),
    (
        OverloadedError,
        ErrorReply(429, ErrorCode.QUEUE_FULL, headers={"Retry-After": "1", "retry-after-ms": "1000"}),
    ),
    (ShuttingDownError, ErrorReply(503, ErrorCode.SHUTTING_DOWN, headers={"Retry-After": "5"})),
    (NoReplicaError, ErrorReply(503, ErrorCode.NO_REPLICA, headers={"Retry-After": "1"})),
    (UpstreamError, ErrorReply(502, ErrorCode.UPSTREAM_ERROR)),
    (EngineError, ErrorReply(500, ErrorCode.ENGINE_ERROR)),
    (KVShareError, ErrorReply(500, ErrorCode.INTERNAL_ERROR)),
)


def to_reply(exc: Exception) -> ErrorReply:
    """Return the client's reply to `exc`. An unexpected error is reported without its message."""
    if isinstance(exc, HttpError):
        return exc.reply
    if isinstance(exc, web.HTTPException):
        return _http_reply(exc)
    if isinstance(exc, RecursionError):  # a body that could just be parsed, and not be written again
        return ErrorReply(400, message="The JSON body is nested too deeply.")
    for error_class, reply in _TABLE:
        if isinstance(exc, error_class):
            message = str(exc) or (type(exc).__doc__ or "").strip() or "The request cannot be answered."
            reply = replace(reply, message=message)
            return replace(reply, code=exc.code, param=exc.param) if isinstance(exc, RequestError) else reply
    return ErrorReply(500, ErrorCode.INTERNAL_ERROR, "The server failed to answer; see its log.")


def _http_reply(exc: web.HTTPException) -> ErrorReply:
    """aiohttp's own refusals, which come as text/plain, in OpenAI's shape."""
    if isinstance(exc, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(exc.allowed_methods))
        message = f"This route does not take {exc.method[:_MAX_QUOTED]}: expected {allowed}."
        return ErrorReply(405, ErrorCode.METHOD_NOT_ALLOWED, message, {"Allow": allowed})
    if isinstance(exc, web.HTTPRequestEntityTooLarge):
        message = "The request body is larger than this server accepts."
        return ErrorReply(413, ErrorCode.REQUEST_TOO_LARGE, message)
    return ErrorReply(exc.status, message=f"{HTTPStatus(exc.status).phrase}.")
