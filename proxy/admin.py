"""
The operator's routes: probes, metrics, what is stored and what happened to requests, eviction and pinning.

Probes are for orchestrators and load balancers and ask for no key. Answers of `/admin` may name donors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from aiohttp import web
from prometheus_client import generate_latest

from kvshare.admin import (
    DiffQuestion,
    Evict,
    NodeQuestion,
    Pin,
    StatsQuestion,
    TreeQuestion,
    Unpin,
    checked,
)
from kvshare.errors import ErrorCode, RequestError
from proxy.context import SERVER, ServerContext
from proxy.errors import HttpError
from proxy.lifecycle import Phase
from proxy.request_body import read_object

Handler = Callable[[web.Request], Awaitable[web.Response]]

_MOST_LISTED = 1000


def add_routes(app: web.Application, *, serves_admins: bool) -> None:
    """Probes, and for admins all but `/admin/explain`, which each kind of engine adds itself."""
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    if not serves_admins:
        return
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/admin/stats", stats)
    app.router.add_get("/admin/tree", tree)
    app.router.add_get("/admin/node/{id}", node)
    app.router.add_get("/admin/diff", diff)
    app.router.add_post("/admin/evict", _executing(Evict))
    app.router.add_post("/admin/pin", _executing(Pin))
    app.router.add_post("/admin/unpin", _executing(Unpin))
    app.router.add_get("/admin/requests", requests)
    app.router.add_get("/admin/requests/{id}", request_by_id)


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


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    body = generate_latest(request.app[SERVER].metrics.registry)
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def stats(request: web.Request) -> web.Response:
    """GET /admin/stats: how much is stored."""
    server = request.app[SERVER]
    return _answer(server, await server.engine.stats(checked(StatsQuestion, _arguments(request))))


async def tree(request: web.Request) -> web.Response:
    """GET /admin/tree: prompts below their parents."""
    server = request.app[SERVER]
    return _answer(server, await server.engine.tree(checked(TreeQuestion, _arguments(request))))


async def node(request: web.Request) -> web.Response:
    """GET /admin/node/{id}: one prompt."""
    server = request.app[SERVER]
    return _answer(server, await server.engine.node(checked(NodeQuestion, _arguments(request))))


async def diff(request: web.Request) -> web.Response:
    """GET /admin/diff?a=ID&b=ID: the edits between two prompts."""
    server = request.app[SERVER]
    return _answer(server, await server.engine.diff(checked(DiffQuestion, _arguments(request))))


def _executing(kind: type[Evict] | type[Pin] | type[Unpin]) -> Handler:
    """A handler that carries out a command of this kind; its body has the arguments."""

    async def handler(request: web.Request) -> web.Response:
        command = checked(kind, await read_object(request))
        return web.json_response(await request.app[SERVER].engine.execute(command))

    return handler


def _arguments(request: web.Request) -> Mapping[str, str]:
    """Those of the query, and of the path, which wins."""
    return {**request.query, **request.match_info}


def _answer(server: ServerContext, document: Mapping[str, Any]) -> web.Response:
    """The document, with whose the namespaces in it are."""
    if digests := _digests_in(document):
        document = {**document, "owners": _owners(server, digests)}
    return web.json_response(document)


def _digests_in(document: Mapping[str, Any]) -> set[str]:
    rows = (document, *document.get("namespaces", ()), *document.get("roots", ()))
    return {row["namespace"] for row in rows if "namespace" in row}


def _owners(server: ServerContext, digests: AbstractSet[str]) -> dict[str, dict[str, Any]]:
    """Of these namespaces, whose they are, as far as the configured keys tell."""
    found: dict[str, dict[str, Any]] = {}
    for owner, words in server.keyring.owners():
        found |= dict.fromkeys(digests & set(server.engine.digests_of(owner)), words)
    return found


async def requests(request: web.Request) -> web.Response:
    """GET /admin/requests?limit=N: what happened to the last N generating requests, newest first."""
    if unknown := sorted(request.query.keys() - {"limit"}):
        raise RequestError(f"{unknown[0][:40]}: unknown argument; expected limit", param=unknown[0][:40])
    limit = request.query.get("limit", "20")
    is_number = limit.isascii() and limit.isdigit() and len(limit) <= len(str(_MOST_LISTED))
    if not (is_number and 1 <= int(limit) <= _MOST_LISTED):
        raise RequestError(f"limit: expected 1 to {_MOST_LISTED}, got {limit!r}", param="limit")
    return web.json_response({"requests": request.app[SERVER].history.latest(int(limit))})


async def request_by_id(request: web.Request) -> web.Response:
    """GET /admin/requests/{id}: one of them, by the `X-KVShare-Request` of its answer."""
    found = request.app[SERVER].history.get(request.match_info["id"])
    if found is None:
        message = (
            "No request with this id is known; only the latest are. Ids are in the header X-KVShare-Request."
        )
        raise HttpError(404, ErrorCode.NOT_FOUND, message)
    return web.json_response(found)
