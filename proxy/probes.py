"""Whether the process is alive and takes requests, for orchestrators and load balancers; no key is needed."""

from __future__ import annotations

from aiohttp import web

from proxy.context import SERVER
from proxy.lifecycle import Phase


def add_routes(app: web.Application) -> None:
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)


async def health(request: web.Request) -> web.Response:
    """GET /health: the process answers."""
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 when requests are taken; loading, draining and a dead engine are 503."""
    server = request.app[SERVER]
    phase = server.lifecycle.phase
    if phase is not Phase.READY:
        return web.json_response({"status": phase, "detail": ""}, status=503)
    status = server.engine.status()
    detail = status.detail
    if status.index is not None and status.index.paused is not None:
        detail += f"; the index is paused: {status.index.paused}"
    document = {"status": "ready" if status.ready else "failed", "detail": detail}
    return web.json_response(document, status=200 if status.ready else 503)
