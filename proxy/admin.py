"""The operator's routes: what is stored, what would be shared, what to drop. Answers may name donors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from proxy.context import SERVER
from proxy.request_body import read_object


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    body = request.app[SERVER].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


def question(what: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that puts the path's and the query's arguments to `Engine.inspect(what)`."""

    async def handler(request: web.Request) -> web.Response:
        return await _inspect(request, what, {**request.query, **request.match_info})

    return handler


async def evict(request: web.Request) -> web.Response:
    """POST /admin/evict; the body says what, the engine checks it."""
    return await _inspect(request, "evict", await read_object(request))


async def _inspect(request: web.Request, what: str, arguments: Mapping[str, Any]) -> web.Response:
    server = request.app[SERVER]
    server.lifecycle.check_accepting()
    return web.json_response(await server.engine.inspect(what, arguments))
