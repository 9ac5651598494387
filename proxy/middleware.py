"""Around every handler: the request's id and caller, errors in its API's shape, metrics, a log line."""

from __future__ import annotations

import asyncio
import difflib
import re
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from http import HTTPStatus

from aiohttp import web

from kvshare.addresses import SERVER_NAME
from kvshare.errors import ErrorCode
from proxy.auth import add_cors_headers, is_for_operators, preflight
from proxy.connection import check_expectation
from proxy.context import SERVER, ServerContext
from proxy.errors import HttpError, speaks_anthropic, to_reply
from proxy.request_log import log_failure, log_request
from proxy.request_record import RECORD, RequestFailure, RequestRecord
from proxy.trace_context import TraceContext
from proxy.tracing import RequestSpan

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLIENT_CLOSED = 499  # nginx's number for a client that went away; in metrics and log only
_FREE = ("GET", "HEAD", "OPTIONS")  # methods of requests that compute nothing
# Routes that need no key. The dashboard's files hold no data.
_OPEN = ("/health", "/ready", "/status", "/openapi.json", "/docs", "/admin/ui", "/admin/ui/{name}", "unknown")
_TRACED = ("/v1/", "/openai/")  # probes and operators' routes are not
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")  # that may be logged
_LIKE = 0.7  # difflib's ratio: "/chat/completions" and "/v1/chat/completions" have 0.92
_MAX_COMPARED = 100  # characters of a path


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer in any case, then count and log the request, once its answer was handed to the socket."""
    server = request.app[SERVER]
    unique_id, given = uuid.uuid4().hex, request.headers.get("X-Request-Id", "")
    request_id = given if _REQUEST_ID.fullmatch(given) else unique_id
    span, trace = None, TraceContext.of(request.headers)
    if server.tracer is not None and request.path.startswith(_TRACED):
        span = server.tracer.begin(request.method, request.headers)
        trace = span.context
    record = request[RECORD] = RequestRecord(request_id, unique_id, trace)
    status = CLIENT_CLOSED
    try:
        response = await _answer(request, handler, server)
        status = CLIENT_CLOSED if record.answer.disconnected else response.status
        return response
    finally:
        # aiohttp writes an answer that is not streamed when this has returned. What is called soon runs after
        # that, and before anything that a client sends next is read.
        asyncio.get_running_loop().call_soon(_note, server, request, status, span)


def _note(server: ServerContext, request: web.Request, status: int, span: RequestSpan | None) -> None:
    """Count and log a request that is over."""
    endpoint, record = _endpoint(request), request[RECORD]
    server.metrics.count(record, endpoint=endpoint, status=status)
    if record.admission.is_counted:
        server.usage.count(record, status)
    if record.preparation.mode is not None:
        server.history.end(record, endpoint, status)
        server.activity.count(record, status)
    log_request(record, endpoint, status, request.remote or "-")
    if span is not None:
        span.end(record, endpoint, status)


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Runs before a response's headers are sent: adds the request's id and what was planned for it."""
    response.headers["Server"] = SERVER_NAME  # aiohttp's default would show its version and Python's
    add_cors_headers(request, response, request.app[SERVER].settings.server.cors_origins)
    if RECORD not in request:
        return
    record = request[RECORD]
    response.headers["X-Request-Id"] = record.request_id
    if record.trace is not None:
        response.headers["traceresponse"] = record.trace.header
    if speaks_anthropic(request):
        response.headers["Request-Id"] = record.request_id
    if record.admission.is_counted:
        allowance = request.app[SERVER].live.quotas.allowance(record.admission.caller.tenant)
        if allowance is not None:
            response.headers.update(allowance.headers(is_anthropic=speaks_anthropic(request)))
    if record.body.rules:
        response.headers["X-KVShare-Rules"] = ",".join(record.body.rules)
    if record.preparation.mode is not None:
        request.app[SERVER].history.begin(record, _endpoint(request))
        response.headers["X-KVShare-Request"] = record.unique_id
        if record.answer.reports:
            total = record.answer.total  # donors are never named
            counts = f"exact={total.num_exact},copied={total.num_copied},computed={total.num_missed}"
            response.headers["X-KVShare-Decision"] = total.decision
            response.headers["X-KVShare-Plan"] = counts
        if record.reason is not None:
            response.headers["X-KVShare-Reason"] = record.reason


async def _answer(request: web.Request, handler: Handler, server: ServerContext) -> web.StreamResponse:
    try:
        check_expectation(request)
        answer = preflight(request, server.settings.server.cors_origins)
        if answer is not None:  # before keys are asked for: a browser sends none with it
            return answer
        admission = request[RECORD].admission
        admission.is_counted = _admit(request, server)
        if isinstance(request.match_info.http_exception, web.HTTPNotFound):
            raise _unknown_route(request)
        if not admission.is_counted:
            return await handler(request)
        with server.live.quotas.admitted(admission.caller.tenant):
            return await handler(request)
    except Exception as exc:  # noqa: BLE001  the one place where errors become replies
        reply, record = to_reply(exc), request[RECORD]
        record.admission.failure = RequestFailure.of(exc, reply)
        if reply.status >= 500 and reply.status != HTTPStatus.SERVICE_UNAVAILABLE:  # not ready, or draining
            log_failure(record.request_id, exc)
        return reply.to_response(anthropic_id=record.request_id if speaks_anthropic(request) else None)


def _admit(request: web.Request, server: ServerContext) -> bool:
    """
    Record the caller, and check that it may use the matched route now.

    A route asks for a key, and is closed while the server starts or drains, unless it is listed here.
    Returns: whether the request counts for the limits of its tenant: it wants something computed
    """
    route, record, keyring = _endpoint(request), request[RECORD], server.keyring
    is_metrics = route == "/metrics"
    if route in _OPEN or (is_metrics and keyring.is_open):
        with suppress(HttpError):  # none is asked for; a known one is named in the log
            record.admission.caller = keyring.caller_of(request)
        return False
    record.admission.caller = keyring.caller_of(request)
    if is_for_operators(route):
        keyring.check_admin(request, record.admission.caller)
    if not is_metrics:
        server.lifecycle.check_accepting()
    return request.method not in _FREE and not is_for_operators(route)


def _unknown_route(request: web.Request) -> HttpError:
    """The 404 that lists the routes for clients, the most similar one first."""
    routes: dict[str, str] = {}
    for resource in request.app.router.resources():
        path = resource.canonical
        methods = {"any method" if route.method == "*" else route.method for route in resource}
        if not is_for_operators(path) and not path.endswith("/"):  # that is the same route again
            routes[path] = "|".join(sorted(methods - {"HEAD"}))
    like = difflib.get_close_matches(request.path[:_MAX_COMPARED], routes, n=1, cutoff=_LIKE)
    hint = f" Did you mean {routes[like[0]]} {like[0]}?" if like else ""
    listed = ", ".join(f"{methods} {path}" for path, methods in routes.items())
    return HttpError(404, ErrorCode.NOT_FOUND, f"This server has no such route.{hint} It has: {listed}.")


def _endpoint(request: web.Request) -> str:
    """The matched route's pattern, without a slash at its end: one of a few, whatever a client asks for."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical.rstrip("/")
