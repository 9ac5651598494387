"""The operator's routes: what is stored, what is counted, what to drop. Answers may name donors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from proxy.context import SERVER
from proxy.request_body import read_object


def add_routes(app: web.Application) -> None:
    """All but `/admin/explain`, which each kind of engine adds itself."""
    app.router.add_get("/metrics", metrics)
    for path in ("stats", "tree", "node/{id}", "diff"):
        app.router.add_get(f"/admin/{path}", _question(path.partition("/")[0]))
    app.router.add_post("/admin/evict", evict)


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    body = request.app[SERVER].metrics.exposition()
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def evict(request: web.Request) -> web.Response:
    """POST /admin/evict; the body says what, the engine checks it."""
    return await _inspect(request, "evict", await read_object(request))


def _question(what: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """A handler that puts the path's and the query's arguments to `Engine.inspect(what)`."""

    async def handler(request: web.Request) -> web.Response:
        return await _inspect(request, what, {**request.query, **request.match_info})

    return handler


async def _inspect(request: web.Request, what: str, arguments: Mapping[str, Any]) -> web.Response:
    return web.json_response(await request.app[SERVER].engine.inspect(what, arguments))
