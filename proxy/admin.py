"""
The operator's routes: probes, metrics, what is stored and what happened to requests, eviction and pinning.

Probes are for orchestrators and load balancers and ask for no key. Answers of `/admin` may name donors.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
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
from kvshare.parts import in_words
from kvshare.tenants import NamespaceOwner
from proxy import admin_server
from proxy.activity import MOST_MINUTES
from proxy.context import SERVER, ServerContext
from proxy.errors import HttpError
from proxy.lifecycle import Phase
from proxy.parts import part_documents, part_statuses
from proxy.request_body import read_object
from proxy.server_status import status_document

Handler = Callable[[web.Request], Awaitable[web.Response]]

_MOST_LISTED = 1000


def add_routes(app: web.Application, *, serves_admins: bool) -> None:
    """Probes, and for admins all but `/admin/explain`, which each kind of engine adds itself."""
    app.router.add_get("/health", health)
    app.router.add_get("/ready", ready)
    app.router.add_get("/status", parts)
    if not serves_admins:
        return
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/admin/status", status)
    app.router.add_get("/admin/activity", activity)
    app.router.add_get("/admin/stats", stats)
    app.router.add_get("/admin/tree", tree)
    app.router.add_get("/admin/node/{id}", node)
    app.router.add_get("/admin/diff", diff)
    app.router.add_post("/admin/evict", _executing(Evict))
    app.router.add_post("/admin/pin", _executing(Pin))
    app.router.add_post("/admin/unpin", _executing(Unpin))
    admin_server.add_routes(app)
    app.router.add_get("/admin/requests", requests)
    app.router.add_get("/admin/requests/{id}", request_by_id)


async def health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: 200 when requests are taken; loading, draining and a dead engine are 503."""
    server = request.app[SERVER]
    phase = server.lifecycle.phase
    if phase is not Phase.READY:
        return web.json_response({"status": phase, "detail": ""}, status=503)
    status = server.engine.status()
    detail = "; ".join(filter(None, [status.detail, in_words(part_statuses(server, status))]))
    document = {"status": "ready" if status.ready else "failed", "detail": detail}
    return web.json_response(document, status=200 if status.ready else 503)


async def parts(request: web.Request) -> web.Response:
    """GET /status: how each part is, since when, and what to do; always 200. Asks for no key."""
    server = request.app[SERVER]
    phase = server.lifecycle.phase
    if not server.lifecycle.is_engine_up:
        return web.json_response({"status": phase, "parts": []})
    status = server.engine.status()
    documents = part_documents(part_statuses(server, status), with_details=False)
    is_failed = phase is Phase.READY and not status.ready
    return web.json_response({"status": "failed" if is_failed else phase, "parts": documents})


async def metrics(request: web.Request) -> web.Response:
    body = generate_latest(request.app[SERVER].metrics.registry)
    return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})


async def status(request: web.Request) -> web.Response:
    """GET /admin/status: what the server is, and how its parts are."""
    return web.json_response(status_document(request.app[SERVER]))


async def activity(request: web.Request) -> web.Response:
    """GET /admin/activity?minutes=N: what requests reused, saved and cost, over time and by tenant."""
    minutes = _count(request, "minutes", default=60, most=MOST_MINUTES)
    return web.json_response(request.app[SERVER].activity.document(minutes))


async def stats(request: web.Request) -> web.Response:
    """GET /admin/stats: how much is stored."""
    server = request.app[SERVER]
    _know_owners(server)
    return _answer(server, await server.engine.stats(checked(StatsQuestion, _arguments(request))))


async def tree(request: web.Request) -> web.Response:
    """GET /admin/tree: prompts below their parents."""
    server = request.app[SERVER]
    _know_owners(server)
    return _answer(server, await server.engine.tree(checked(TreeQuestion, _arguments(request))))


async def node(request: web.Request) -> web.Response:
    """GET /admin/node/{id}: one prompt."""
    server = request.app[SERVER]
    _know_owners(server)
    return _answer(server, await server.engine.node(checked(NodeQuestion, _arguments(request))))


async def diff(request: web.Request) -> web.Response:
    """GET /admin/diff?a=ID&b=ID: the edits between two prompts."""
    server = request.app[SERVER]
    return _answer(server, await server.engine.diff(checked(DiffQuestion, _arguments(request))))


def _executing(kind: type[Evict] | type[Pin] | type[Unpin]) -> Handler:
    """A handler that carries out a command of this kind; its body has the arguments."""

    async def handler(request: web.Request) -> web.Response:
        command, server = checked(kind, await read_object(request)), request.app[SERVER]
        _know_owners(server)
        return web.json_response(await server.engine.execute(command))

    return handler


def _arguments(request: web.Request) -> Mapping[str, str]:
    """Return the arguments of the query and of the path, which wins."""
    return {**request.query, **request.match_info}


def _answer(server: ServerContext, document: Mapping[str, Any]) -> web.Response:
    if digests := _digests_in(document):
        document = {**document, "owners": _owners(server, digests)}
    return web.json_response(document)


def _digests_in(document: Mapping[str, Any]) -> set[str]:
    rows = (document, *document.get("namespaces", ()), *document.get("roots", ()))
    return {row["namespace"] for row in rows if "namespace" in row}


def _owners(server: ServerContext, digests: AbstractSet[str]) -> dict[str, dict[str, Any]]:
    """Return the owners of these namespaces, also those of keys that are not configured any more."""
    owners = ((digest, server.engine.tenants.owner_of(digest)) for digest in sorted(digests))
    return {digest: _described(server, owner) for digest, owner in owners if owner is not None}


def _described(server: ServerContext, owner: NamespaceOwner) -> dict[str, Any]:
    """`keys`: those that use such a namespace now. `divided`: by a client's salt."""
    keys = server.keyring.names_of(owner.tenant, owner.scope, owner.key)
    return {"tenant": owner.tenant, "scope": owner.scope, "keys": keys, "divided": owner.is_divided}


def _know_owners(server: ServerContext) -> None:
    """The namespaces of the configured keys, also of those of which no request came since the start."""
    for owner in server.keyring.owners():
        for digest in server.engine.digests_of(owner):
            server.engine.tenants.note(digest, owner)


async def requests(request: web.Request) -> web.Response:
    """GET /admin/requests?limit=N&tenant=NAME: what happened to the last N generating requests."""
    limit = _count(request, "limit", default=20, most=_MOST_LISTED, others=("tenant",))
    return web.json_response(
        {"requests": request.app[SERVER].history.latest(limit, request.query.get("tenant"))}
    )


def _count(request: web.Request, name: str, *, default: int, most: int, others: Sequence[str] = ()) -> int:
    """An argument of a query, a number from 1 on; there may be `others`. Raises RequestError."""
    if unknown := sorted(request.query.keys() - {name, *others}):
        expected = " or ".join([name, *others])
        raise RequestError(f"{unknown[0][:40]}: unknown argument; expected {expected}", param=unknown[0][:40])
    text = request.query.get(name, str(default))
    is_number = text.isascii() and text.isdigit() and len(text) <= len(str(most))
    if not (is_number and 1 <= int(text) <= most):
        raise RequestError(f"{name}: expected 1 to {most}, got {text!r}", param=name)
    return int(text)


async def request_by_id(request: web.Request) -> web.Response:
    """GET /admin/requests/{id}: one of them, by the `X-KVShare-Request` of its answer."""
    entry = request.app[SERVER].history.get(request.match_info["id"])
    if entry is None:
        message = (
            "No request with this id is known; only the latest are. Ids are in the header X-KVShare-Request."
        )
        raise HttpError(404, ErrorCode.NOT_FOUND, message)
    return web.json_response({**entry, "gone": await _gone(request.app[SERVER], entry)})


async def _gone(server: ServerContext, document: Mapping[str, Any]) -> list[int]:
    """Return those of a request's donors, and of the nodes it was stored as, that were evicted since."""
    donors = {donor for prompt in document["prompts"] for donor in prompt["donors"]}
    stored = {entry["node"] for entry in document.get("stored", ()) if entry["node"] is not None}
    gone = []
    for node_id in sorted(donors | stored):
        try:
            await server.engine.tree(TreeQuestion(root=node_id, depth=1))
        except RequestError:
            gone.append(node_id)
    return gone
