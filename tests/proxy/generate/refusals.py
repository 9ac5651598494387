"""A refusal as clients see it."""

from __future__ import annotations

import json

import aiohttp

from tests.proxy.conftest import Server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


async def check_refused(
    server: Server,
    response: aiohttp.ClientResponse,
    *,
    status: int = 400,
    param: str | None = None,
    code: str | None = None,
    kind: str = "invalid_request_error",
) -> str:
    """The error's shape and values, that nothing was kept, and that the server goes on; gives the message."""
    assert response.content_type == "application/json"
    document = json.loads(await response.read())
    assert document.keys() == {"error"}
    error = document["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (response.status, error["param"], error["code"], error["type"]) == (status, param, code, kind)
    assert error["message"]
    assert response.headers["X-Request-Id"]
    assert not any(server.engine.stored.values())
    assert (await server.get("/health")).status == 200
    return str(error["message"])
