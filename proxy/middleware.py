"""Around every handler: the request's id and caller, errors in its API's shape, metrics, a log line."""

from __future__ import annotations

import re
import uuid
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from aiohttp import web

from proxy.auth import Role
from proxy.context import SERVER, ServerContext
from proxy.cors import add_cors_headers, is_preflight, preflight
from proxy.errors import is_anthropic, to_reply
from proxy.request_log import RECORD, Failure, RequestRecord, combine, log_failure, log_request
from proxy.runner import SERVER_NAME
from proxy.unknown_route import unknown_route

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLIENT_CLOSED = 499  # nginx's number for a client that went away; in metrics and log only
_OPEN = ("/health", "/ready", "/openapi.json", "/docs", "unknown")  # routes that ask for no key
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@web.middleware
async def observe(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer in any case, then count and log the request."""
    server = request.app[SERVER]
    unique_id = uuid.uuid4().hex
    record = request[RECORD] = RequestRecord(_request_id(request) or unique_id, unique_id)
    status = CLIENT_CLOSED
    try:
        response = await _answer(request, handler, server)
        status = CLIENT_CLOSED if record.disconnected else response.status
        return response
    finally:
        endpoint = _endpoint(request)
        server.metrics.count(record, endpoint=endpoint, status=status)
        if record.mode is not None:
            server.history.end(record, endpoint, status)
        log_request(record, endpoint, status, request.remote or "-")


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Runs before a response's headers are sent: adds the request's id and what was planned for it."""
    response.headers["Server"] = SERVER_NAME
    add_cors_headers(request, response, request.app[SERVER].settings.server.cors_origins)
    if RECORD not in request:
        return
    record = request[RECORD]
    response.headers["X-Request-Id"] = record.request_id
    if is_anthropic(request.path):
        response.headers["Request-Id"] = record.request_id
    if record.rules:
        response.headers["X-KVShare-Rules"] = ",".join(record.rules)
    if record.mode is not None:
        request.app[SERVER].history.begin(record, _endpoint(request))
        response.headers.update(_plan_headers(record))


def _plan_headers(record: RequestRecord) -> dict[str, str]:
    """Counts are of the plan; donors are never named."""
    headers = {"X-KVShare-Request": record.unique_id}
    if record.reports:
        total = combine(record.reports.values())
        num_computed = total.num_recomputed + total.num_repaired
        headers["X-KVShare-Decision"] = total.decision
        headers["X-KVShare-Plan"] = (
            f"exact={total.num_exact},copied={total.num_copied},computed={num_computed}"
        )
    if record.reason is not None:
        headers["X-KVShare-Reason"] = record.reason
    return headers


async def _answer(request: web.Request, handler: Handler, server: ServerContext) -> web.StreamResponse:
    try:
        if is_preflight(request):  # before keys are asked for: a browser sends none with it
            return preflight(request, server.settings.server.cors_origins)
        _admit(request, server)
        if isinstance(request.match_info.http_exception, web.HTTPNotFound):
            raise unknown_route(request)
        return await handler(request)
    except Exception as exc:  # noqa: BLE001  the one place where errors become replies
        reply, record = to_reply(exc), request[RECORD]
        record.failure = Failure.of(exc, reply)
        if reply.status >= 500 and reply.status != HTTPStatus.SERVICE_UNAVAILABLE:  # that is a state
            log_failure(record.request_id, exc)
        return reply.to_response(request.path, record.request_id)


def _admit(request: web.Request, server: ServerContext) -> None:
    """
    Record the caller, and check that it may use the matched route now.

    A route asks for a key, and is closed while the server starts or drains, unless it is listed here.
    """
    route, record, keyring = _endpoint(request), request[RECORD], server.keyring
    is_metrics = route == "/metrics"
    if route in _OPEN or (is_metrics and keyring.is_open):
        return
    record.caller = keyring.caller_of(request)
    keyring.check_role(request, record.caller, Role.ADMIN if _is_for_admins(route) else Role.INFER)
    if not is_metrics:
        server.lifecycle.check_accepting()


def _is_for_admins(route: str) -> bool:
    return route == "/metrics" or route.startswith("/admin/")


def _endpoint(request: web.Request) -> str:
    """The matched route's pattern, without a slash at its end: one of a few, whatever a client asks for."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical.rstrip("/")


def _request_id(request: web.Request) -> str:
    """The client's; empty where it gives none, or none that may be logged."""
    given = request.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else ""
