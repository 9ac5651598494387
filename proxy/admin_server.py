"""
The routes by which administrators change a running server, and see who uses it: its settings, its keys, its
tenants and their usage. None shows the hash of a key.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from kvshare.admin import StatsQuestion
from kvshare.errors import ConfigError, ErrorCode, RequestError
from proxy.context import SERVER, ServerContext
from proxy.request_body import read_object
from proxy.setting_changes import Changes
from proxy.usage import UsageQuestion


def add_routes(app: web.Application) -> None:
    app.router.add_get("/admin/settings", settings)
    app.router.add_post("/admin/settings", change)
    app.router.add_post("/admin/reload", reload)
    app.router.add_get("/admin/tenants", tenants)
    app.router.add_get("/admin/usage", usage)


async def settings(request: web.Request) -> web.Response:
    """GET /admin/settings: those in force, and where each comes from."""
    return web.json_response(request.app[SERVER].live.document())


async def change(request: web.Request) -> web.Response:
    """POST /admin/settings: set some by their paths, until the server stops."""
    values = await read_object(request)
    try:
        return _reported(await request.app[SERVER].live.change(values))
    except ConfigError as exc:
        raise _refused(exc) from exc


async def reload(request: web.Request) -> web.Response:
    """POST /admin/reload: read the files of settings and keys again."""
    try:
        return _reported(await request.app[SERVER].live.reload())
    except ConfigError as exc:
        raise _refused(exc) from exc


async def tenants(request: web.Request) -> web.Response:
    """GET /admin/tenants: each with its keys, limits, and what it uses of them now."""
    server = request.app[SERVER]
    stored = await server.engine.stats(StatsQuestion())
    num_bytes = {row["tenant"]: row["num_bytes"] for row in stored["tenants"]}
    names = dict.fromkeys([*server.keyring.tenants(), *num_bytes])
    evicted = server.engine.status().counts.tenant_evictions
    rows = [
        {**_tenant(server, name), "kv_bytes": num_bytes.get(name, 0), "evicted": evicted[name]}
        for name in names
    ]
    return web.json_response({"tenants": rows})


def _tenant(server: ServerContext, name: str) -> dict[str, Any]:
    quotas = server.live.quotas
    limits, allowance = quotas.limits_of(name), quotas.allowance(name)
    return {
        "tenant": name,
        "keys": [
            {"name": key.name, "scope": key.scope, "role": key.role}
            for key in server.live.access.keys
            if key.tenant == name
        ],
        "limits": limits.model_dump(exclude={"name"}),
        "in_flight": quotas.num_in_flight(name),
        "requests_left": None if allowance is None else allowance.remaining,
        "refused": {limit: count for (tenant, limit), count in quotas.num_refused.items() if tenant == name},
    }


async def usage(request: web.Request) -> web.Response:
    """GET /admin/usage?by=key|tenant|day&since=DATE&tenant=NAME: what keys and tenants have used."""
    question = UsageQuestion.from_query(request.query)
    return web.json_response(await request.app[SERVER].usage.document(question))


def _reported(changes: Changes) -> web.Response:
    return web.json_response(changes.document)


def _refused(exc: ConfigError) -> RequestError:
    message = f"the settings are as before: {exc}"
    return RequestError(message, param=exc.key_path, code=ErrorCode.INVALID_SETTINGS)
