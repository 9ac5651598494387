"""The operator's rules, applied to a request's JSON body before anything else reads it. For both engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from kvshare.rules.rewrite import apply_rules
from kvshare.rules.texts import shape_of
from proxy.context import SERVER
from proxy.request_log import RECORD
from proxy.wrong_values import invalid

_APIS = {  # that /admin/explain takes requests of
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
_LARGE_BODY = 256 * 1024  # bytes; larger ones are rewritten off the event loop


async def behind_rules(request: web.Request, body: dict[str, Any]) -> dict[str, Any]:
    """
    The body of `request` as the rules leave it, the very same object where none acts. The request's record
    names those that do.

    Nothing happens where no rules are configured, where the route takes no prompt, or where the body says
    `"kvshare": {"rules": false}`.
    """
    rules, shape = request.app[SERVER].rules, shape_of(api_of(request))
    if not rules or shape is None or _is_opted_out(body):
        return body
    if len(await request.read()) > _LARGE_BODY:  # it has been read: these are the same bytes
        rewritten = await asyncio.to_thread(apply_rules, rules, body, shape)
    else:
        rewritten = apply_rules(rules, body, shape)
    request[RECORD].rules = rewritten.rules
    return rewritten.body


def api_of(request: web.Request) -> str:
    """
    The path of the API that a request's body follows. For /admin/explain the argument `api` names it.

    Raises:  RequestError for another `api`
    """
    path = request.path.rstrip("/")
    if path != "/admin/explain":
        return path
    name = request.query.get("api", "chat")
    if name not in _APIS:
        raise invalid("api", f"expected one of {', '.join(_APIS)}")
    return _APIS[name]


def _is_opted_out(body: Mapping[str, Any]) -> bool:
    """What is wrong about a `kvshare` object is reported where it is read."""
    given = body.get("kvshare")
    return isinstance(given, Mapping) and given.get("rules") is False
