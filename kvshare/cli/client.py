"""
Asks a running server: KVShare's admin routes, or those of vLLM and of the connector in it. The only file of
the command line that talks HTTP.

Neither proxies nor redirects are followed: a key goes to the named host and nowhere else.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from kvshare.errors import KVShareError, UnreachableError


class AnswerError(KVShareError):
    """The server answered, but not with what was asked for."""

    def __init__(self, url: str, status: int, message: str) -> None:
        super().__init__(f"{url} answered {status}: {message}")
        self.status = status
        self.message = message


class JsonClient:
    """The JSON routes of the server at `url` (http or https; checked by the caller)."""

    _key_hint = ""

    def __init__(self, url: str, *, key: str | None, timeout_s: float = 10.0) -> None:
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The JSON object at `path`; None values are left out of the query."""
        pairs = {name: str(value) for name, value in (query or {}).items() if value is not None}
        return self._object(self._send("GET", path, params=pairs))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The JSON object that the server answers to this body."""
        return self._object(self._send("POST", path, json=body))

    def ping(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """GET, or POST with a body. Raises as the others do, whatever the answer's body is."""
        self._send("GET" if body is None else "POST", path, json=body)

    def _object(self, document: object) -> dict[str, Any]:
        if not isinstance(document, dict):
            raise AnswerError(self._url, 200, "not a JSON object; is that a KVShare server?")
        return document

    def _send(self, method: str, path: str, **content: Any) -> object:
        try:
            return asyncio.run(self._exchange(method, self._url + path, **content))
        except aiohttp.ClientConnectorError as exc:
            problem = os.strerror(exc.errno) if exc.errno else exc.strerror or str(exc)
            raise UnreachableError(self._url, problem) from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            problem = str(exc).partition("\n")[0].strip() or type(exc).__name__
            raise UnreachableError(self._url, problem) from exc

    async def _exchange(self, method: str, url: str, **content: Any) -> object:
        """The answer's JSON; None for what is none."""
        document = None
        async with (
            aiohttp.ClientSession(headers=self._headers, timeout=self._timeout) as session,
            session.request(method, url, allow_redirects=False, **content) as response,
        ):
            with suppress(ValueError):
                document = json.loads(await response.read())
        if response.status == 200:
            return document
        error = document.get("error") if isinstance(document, dict) else None
        message = error.get("message") if isinstance(error, dict) else error  # the connector's are plain text
        hint = self._key_hint if response.status in (401, 403) else ""
        problem = message or response.reason or "no reason given"
        raise AnswerError(self._url, response.status, f"{problem}{hint}")


class AdminClient(JsonClient):
    """The admin routes of `kvshare serve`."""

    _key_hint = " (give an admin key with --key or KVSHARE_ADMIN_KEY)"

    def ask(self, what: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The document of a question, as `kvshare.cli.source` puts it."""
        if what == "explain":
            request = {name: value for name, value in arguments.items() if name != "api"}
            model = request.get("model") or self.get("/v1/models")["data"][0]["id"]
            return self.post(
                f"/admin/explain?api={arguments.get('api', 'chat')}", {**request, "model": model}
            )
        if what in ("evict", "pin", "unpin"):
            return self.post(f"/admin/{what}", arguments)
        if what == "node":
            return self.get(f"/admin/node/{arguments['id']}")
        return self.get(f"/admin/{what}", arguments)
