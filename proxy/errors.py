"""
Every error as HTTP: one table from error class to status, type and code, and one body shape.

* KVShareError
  - HttpError        what HTTP itself refuses: 401, 403, 404, 405, 408, 413, 415, 503 while loading
  x the rest         see `kvshare.errors`; the table below gives each its status

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`, always with all four keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from aiohttp import web

from kvshare.errors import (
    EngineError,
    KVShareError,
    ModelNotFoundError,
    NoReplicaError,
    OverloadedError,
    RequestError,
    ShuttingDownError,
    UpstreamError,
)

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as it goes out, as a response of its own or as the last event of a stream."""

    status: int
    type: str
    code: str | None
    message: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def to_response(self) -> web.Response:
        return web.Response(
            status=self.status,
            body=json.dumps(self.body).encode(),
            content_type="application/json",
            headers=self.headers,
        )


class HttpError(KVShareError):
    """A refusal that concerns HTTP alone; carries the whole reply."""

    def __init__(self, reply: ErrorReply) -> None:
        super().__init__(reply.message)
        self.reply = reply


def unauthorized() -> HttpError:
    message = "Incorrect or missing API key. Send it as 'Authorization: Bearer <key>'."
    headers = {"WWW-Authenticate": "Bearer"}
    return HttpError(ErrorReply(401, "authentication_error", "invalid_api_key", message, headers=headers))


def forbidden(message: str) -> HttpError:
    return HttpError(ErrorReply(403, "permission_error", "permission_denied", message))


def not_found(message: str) -> HttpError:
    return HttpError(ErrorReply(404, INVALID_REQUEST, "not_found", message))


def bad_path() -> HttpError:
    return HttpError(ErrorReply(400, INVALID_REQUEST, "bad_path", "This path cannot be passed on."))


def upstream_timed_out(timeout_s: float) -> HttpError:
    message = f"The model server said nothing for {timeout_s:g} s."
    return HttpError(ErrorReply(504, SERVER_ERROR, "upstream_timeout", message))


def body_timed_out(timeout_s: float) -> HttpError:
    message = f"The request body did not arrive within {timeout_s:g} s."
    return HttpError(ErrorReply(408, INVALID_REQUEST, "request_timeout", message))


def wrong_content_type() -> HttpError:
    message = "Send the body with 'Content-Type: application/json'."
    return HttpError(ErrorReply(415, INVALID_REQUEST, "unsupported_media_type", message))


def not_ready(detail: str) -> HttpError:
    message = f"The server cannot answer yet: {detail}."
    return HttpError(ErrorReply(503, SERVER_ERROR, "not_ready", message, headers={"Retry-After": "1"}))


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    type: str
    code: str | None = None  # None: the error's own
    headers: Mapping[str, str] = field(default_factory=dict)


# The first row whose class matches counts, so a class stands before its parents.
_TABLE: tuple[tuple[type[KVShareError], _Row], ...] = (
    (ModelNotFoundError, _Row(404, INVALID_REQUEST)),
    (RequestError, _Row(400, INVALID_REQUEST)),
    (
        OverloadedError,
        _Row(429, "rate_limit_error", "queue_full", {"Retry-After": "1", "retry-after-ms": "1000"}),
    ),
    (ShuttingDownError, _Row(503, SERVER_ERROR, "shutting_down", {"Retry-After": "5"})),
    (NoReplicaError, _Row(503, SERVER_ERROR, "no_replica", {"Retry-After": "1"})),
    (UpstreamError, _Row(502, SERVER_ERROR, "upstream_error")),
    (EngineError, _Row(500, SERVER_ERROR, "engine_error")),
    (KVShareError, _Row(500, SERVER_ERROR, "internal_error")),
)

_HTTP_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}
_HTTP_MESSAGES = {
    404: "This server has no such route.",
    405: "This route does not take this method.",
    413: "The request body is larger than this server accepts.",
}


def to_reply(exc: Exception) -> ErrorReply:
    """What the client learns of `exc`. An unexpected error is reported without its message."""
    if isinstance(exc, HttpError):
        return exc.reply
    if isinstance(exc, web.HTTPException):
        return _http_reply(exc)
    for error_class, row in _TABLE:
        if isinstance(exc, error_class):
            param = exc.param if isinstance(exc, RequestError) else None
            code = exc.code if isinstance(exc, RequestError) else row.code
            return ErrorReply(row.status, row.type, code, _message(exc), param, row.headers)
    return ErrorReply(500, SERVER_ERROR, "internal_error", "The server failed to answer; see its log.")


def _message(exc: KVShareError) -> str:
    return str(exc) or (type(exc).__doc__ or "").strip() or "The request cannot be answered."


def _http_reply(exc: web.HTTPException) -> ErrorReply:
    """aiohttp's own refusals, which come as text/plain, in OpenAI's shape."""
    headers = {"Allow": exc.headers["Allow"]} if "Allow" in exc.headers else {}
    message = _HTTP_MESSAGES.get(exc.status, f"{HTTPStatus(exc.status).phrase}.")
    error_type = SERVER_ERROR if exc.status >= 500 else INVALID_REQUEST
    return ErrorReply(exc.status, error_type, _HTTP_CODES.get(exc.status), message, headers=headers)
