"""What a client learns that asks for a route which is not there: which ones are."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from aiohttp import web

from kvshare.errors import ErrorCode
from proxy.errors import HttpError

_LIKE = 0.7  # difflib's ratio: "/chat/completions" and "/v1/chat/completions" have 0.92
_MAX_COMPARED = 100  # characters of a path
_OF_OPERATORS = ("/admin/", "/metrics")


def unknown_route(request: web.Request) -> HttpError:
    """The 404 that lists the routes for clients, the most similar one first."""
    routes = dict(_routes(request.app))
    like = difflib.get_close_matches(request.path[:_MAX_COMPARED], routes, n=1, cutoff=_LIKE)
    hint = f" Did you mean {routes[like[0]]} {like[0]}?" if like else ""
    listed = ", ".join(f"{methods} {path}" for path, methods in routes.items())
    return HttpError(404, ErrorCode.NOT_FOUND, f"This server has no such route.{hint} It has: {listed}.")


def _routes(app: web.Application) -> Iterator[tuple[str, str]]:
    """Path and methods of each route for clients, such as "/v1/models" and "GET"."""
    for resource in app.router.resources():
        methods = {"any method" if route.method == "*" else route.method for route in resource}
        path = resource.canonical
        if not path.startswith(_OF_OPERATORS) and not path.endswith("/"):  # that is the same route again
            yield path, "|".join(sorted(methods - {"HEAD"}))
