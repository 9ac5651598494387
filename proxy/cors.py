"""
Which web pages of other origins may use this server: those of `server.cors_origins`.

A browser asks first, by a preflight, and lets a page read an answer only if that allows its origin. Those of
operators' routes never do: a page in an operator's browser must not reach them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from aiohttp import web

from proxy.errors import forbidden

ANY = "*"
_OF_OPERATORS = ("/admin", "/metrics")
_METHODS = "GET, POST, PUT, PATCH, DELETE"
_REQUESTED = re.compile(r"[A-Za-z0-9!#$&'*+.^_`|~, -]{1,2048}")  # field names with commas
_EXPOSED = ", ".join(
    [
        *("X-Request-Id", "Request-Id", "Retry-After", "retry-after-ms"),
        *("X-KVShare-Request", "X-KVShare-Decision", "X-KVShare-Plan", "X-KVShare-Reason"),
    ]
)
_MAX_AGE_S = "600"  # browsers cap it; without it each request costs two


def is_preflight(request: web.Request) -> bool:
    """Whether a browser asks if a page may send something."""
    asks = "Origin" in request.headers and "Access-Control-Request-Method" in request.headers
    return request.method == "OPTIONS" and asks


def preflight(request: web.Request, origins: Sequence[str]) -> web.Response:
    """What allows a request, beside what `add_cors_headers` adds. Raises HttpError 403 for other origins."""
    if not _is_allowed(request, origins):
        raise forbidden(
            "Pages of this origin may not call this route: expected one of server.cors_origins, and no "
            "operators' route. See docs/operating.md."
        )
    headers = {"Access-Control-Allow-Methods": _METHODS, "Access-Control-Max-Age": _MAX_AGE_S}
    # Clients add headers of their own (x-stainless-...), and "*" would not cover Authorization: an allowed
    # origin may send all headers that the browser lists.
    requested = request.headers.get("Access-Control-Request-Headers", "")
    if _REQUESTED.fullmatch(requested):
        headers["Access-Control-Allow-Headers"] = requested
    return web.Response(status=204, headers=headers)


def add_cors_headers(request: web.Request, response: web.StreamResponse, origins: Sequence[str]) -> None:
    """Let a page of an allowed origin read an answer. Cookies and the like only for origins by name."""
    if not origins:
        return
    headers = response.headers
    if ANY not in origins:
        headers.add("Vary", "Origin")  # a cache must not answer one origin with what another may read
    if _is_allowed(request, origins):
        by_name = ANY not in origins
        headers["Access-Control-Allow-Origin"] = request.headers["Origin"] if by_name else ANY
        headers["Access-Control-Expose-Headers"] = _EXPOSED
        if by_name:
            headers["Access-Control-Allow-Credentials"] = "true"


def _is_allowed(request: web.Request, origins: Sequence[str]) -> bool:
    """Whether a page of the request's origin may use the route that it asks for."""
    origin, path = request.headers.get("Origin"), request.path
    if origin is None or any(path == each or path.startswith(f"{each}/") for each in _OF_OPERATORS):
        return False
    return ANY in origins or origin in origins
