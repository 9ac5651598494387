"""
Asks a running server: KVShare's admin routes, or those of vLLM and of the connector in it. The only file of
the command line that talks HTTP.

Neither proxies nor redirects are followed: a key goes to the named host and nowhere else.
"""

import asyncio
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from kvshare.addresses import SERVER_NAME
from kvshare.cli.source import Chosen
from kvshare.errors import KVShareError, UnreachableError

Fields = Mapping[str, Any] | None


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
        self.server_name: str | None = None  # what answered last calls itself
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s, sock_read=timeout_s)

    def call(self, path: str, *, query: Fields = None, body: Fields = None) -> dict[str, Any]:
        """The JSON object that answers GET, or POST with a body; None values are left out of the query."""
        document = self.send(path, query=query, body=body)
        if not isinstance(document, dict):
            raise AnswerError(self._url, 200, "not a JSON object; is that a KVShare server?")
        return document

    def send(self, path: str, *, query: Fields = None, body: Fields = None) -> object:
        """Return the same for any answer: its JSON, or None. Raises UnreachableError, AnswerError."""
        pairs = {name: str(value) for name, value in (query or {}).items() if value is not None}
        try:
            return asyncio.run(self._exchange(self._url + path, pairs, body))
        except aiohttp.ClientConnectorError as exc:
            problem = os.strerror(exc.errno) if exc.errno else exc.strerror or str(exc)
            raise UnreachableError(self._url, problem) from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            problem = str(exc).partition("\n")[0].strip() or type(exc).__name__
            raise UnreachableError(self._url, problem) from exc

    async def _exchange(self, url: str, query: Mapping[str, str], body: Fields) -> object:
        self.server_name = None
        document, method = None, "GET" if body is None else "POST"
        async with (
            aiohttp.ClientSession(headers=self._headers, timeout=self._timeout) as session,
            session.request(method, url, params=query, json=body, allow_redirects=False) as response,
        ):
            self.server_name = response.headers.get("Server")
            with suppress(ValueError):
                document = json.loads(await response.read())
        if response.status == 200:
            return document
        error = document.get("error") if isinstance(document, dict) else None
        message = error.get("message") if isinstance(error, dict) else error  # the connector's are plain text
        hint = self._key_hint if response.status in (401, 403) else ""
        problem = message or response.reason or "no reason given"
        raise AnswerError(self._url, response.status, f"{problem}{hint}")


def is_kvshare(url: str, *, timeout_s: float = 3.0) -> bool:
    """Return whether a KVShare server answers at `url`; it need not be ready."""
    client = JsonClient(url, key=None, timeout_s=timeout_s)
    with suppress(KVShareError):
        client.send("/health")
    return client.server_name == SERVER_NAME


class AdminClient(JsonClient):
    """The admin routes of `kvshare serve`: a `Source` of `kvshare.cli.source`."""

    _key_hint = " (give an admin key with --key or KVSHARE_ADMIN_KEY)"

    def stats(self, *, namespace: str | None = None, tenant: str | None = None) -> dict[str, Any]:
        return self.call("/admin/stats", query={"namespace": namespace, "tenant": tenant})

    def status(self) -> dict[str, Any]:
        return self.call("/admin/status")

    def tiers(self) -> dict[str, Any]:
        return {"tiers": self.stats().get("tiers", [])}

    def tree(
        self, *, root: int | None, namespace: str | None, tenant: str | None, depth: int, sort: str
    ) -> dict[str, Any]:
        query = {"root": root, "namespace": namespace, "tenant": tenant, "depth": depth, "sort": sort}
        return self.call("/admin/tree", query=query)

    def node(self, node_id: int) -> dict[str, Any]:
        return self.call(f"/admin/node/{node_id}")

    def diff(self, a: int, b: int, *, min_run: int) -> dict[str, Any]:
        return self.call("/admin/diff", query={"a": a, "b": b, "min_run": min_run})

    def evict(self, which: Chosen, *, older_than_s: int | None, dry_run: bool) -> dict[str, Any]:
        body = {**which.arguments, "older_than_s": older_than_s, "dry_run": dry_run}
        return self.call("/admin/evict", body=body)

    def pin(self, which: Chosen) -> dict[str, Any]:
        return self.call("/admin/pin", body=which.arguments)

    def unpin(self, which: Chosen) -> dict[str, Any]:
        return self.call("/admin/unpin", body=which.arguments)

    def explain(
        self,
        request: Mapping[str, Any],
        *,
        api: str = "chat",
        tenant: str | None = None,
        key: str | None = None,
    ) -> dict[str, Any]:
        """Return the plan that a request would get; without a model in it, of the one that is served."""
        model = request.get("model") or self.call("/v1/models")["data"][0]["id"]
        query = {"api": api, "tenant": tenant, "key": key}
        return self.call("/admin/explain", query=query, body={**request, "model": model})
