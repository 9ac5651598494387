"""
The only HTTP client of vLLM: of a replica's API, and of the control server in its connector.

Two secrets come from the environment: KVSHARE_VLLM_API_KEY is vLLM's own key, KVSHARE_VLLM_TOKEN opens the
control servers. A client's key is never passed on.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import aiohttp
from yarl import URL

from delta_tree import SegmentId
from kvshare.errors import UpstreamError
from kvshare.fleet.upstream import ServedModels, Upstream
from kvshare.settings import ReplicaSettings, VllmSettings
from kvshare.vllm_protocol.json_fields import WireError
from kvshare.vllm_protocol.messages import TOKEN_VARIABLE, HeldSegments, Journal, ReplicaInfo

_KEEP_ALIVE_S = 2.0  # less than uvicorn's 5: a connection must not be used while vLLM closes it
API_KEY_VARIABLE = "KVSHARE_VLLM_API_KEY"


class HttpUpstream(Upstream):
    """One `vllm serve`. Between `open` and `close`."""

    def __init__(self, replica: ReplicaSettings, settings: VllmSettings) -> None:
        self._url = replica.url
        self._control_url = replica.control
        self._settings = settings
        self._api_headers = _bearer(API_KEY_VARIABLE)
        self._control_headers = _bearer(TOKEN_VARIABLE)
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        settings = self._settings
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # what is relayed stays as it is
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
            ),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def send(
        self, method: str, raw_path: str, *, headers: Mapping[str, str], body: bytes
    ) -> aiohttp.ClientResponse:
        """
        Relay a request; returns when vLLM's headers are there. The caller closes the response.

        Raises:  UpstreamError if it did not get through; TimeoutError if vLLM does not answer in time
        """
        try:
            try:
                return await self._request(method, raw_path, headers, body)
            except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                # Most likely an idle connection that vLLM was closing: try a new one.
                return await self._request(method, raw_path, headers, body)
        except aiohttp.ConnectionTimeoutError as exc:
            raise UpstreamError(f"{self._url}: {_describe(exc)}") from exc
        except TimeoutError:
            raise
        except (aiohttp.ClientError, OSError) as exc:
            raise UpstreamError(f"{self._url}: {_describe(exc)}") from exc

    async def _request(
        self, method: str, raw_path: str, headers: Mapping[str, str], body: bytes
    ) -> aiohttp.ClientResponse:
        return await self._open_session.request(
            method,
            URL(self._url + raw_path, encoded=True),
            headers={**headers, **self._api_headers},
            data=body or None,
            allow_redirects=False,
        )

    async def check_health(self) -> None:
        await self._ask("GET", f"{self._url}/health", headers=self._api_headers, expects_json=False)

    async def models(self) -> ServedModels:
        """Adapters name the model they stand on as their parent; base models name none."""
        document = await self._ask("GET", f"{self._url}/v1/models", headers=self._api_headers)
        entries = document.get("data") if isinstance(document, Mapping) else None
        if not isinstance(entries, list):
            raise UpstreamError(f"{self._url}/v1/models: expected a list of models")
        base = [entry for entry in entries if isinstance(entry, Mapping) and not entry.get("parent")]
        lengths = [entry["max_model_len"] for entry in base if isinstance(entry.get("max_model_len"), int)]
        return ServedModels(tuple(str(entry.get("id")) for entry in base), min(lengths, default=0))

    async def tokenize(self, body: Mapping[str, Any]) -> list[int]:
        document = await self._ask("POST", f"{self._url}/tokenize", headers=self._api_headers, body=body)
        tokens = document.get("tokens") if isinstance(document, Mapping) else None
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise UpstreamError(f"{self._url}/tokenize: expected a list of token ids")
        return tokens

    async def info(self) -> ReplicaInfo:
        document = await self._control("GET", "/info")
        with self._checked("/info"):
            return ReplicaInfo.from_json(document)

    async def journal(self, *, after: int, wait_s: float) -> Journal:
        document = await self._control("GET", f"/journal?after={after}&wait_s={wait_s:g}", wait_s=wait_s)
        with self._checked("/journal"):
            return Journal.from_json(document)

    async def segments(self) -> HeldSegments:
        document = await self._control("GET", "/segments")
        with self._checked("/segments"):
            return HeldSegments.from_json(document)

    async def drop(self, segment_ids: Iterable[SegmentId]) -> None:
        await self._control("POST", "/drop", body={"segment_ids": list(segment_ids)})

    @property
    def _open_session(self) -> aiohttp.ClientSession:
        assert self._session is not None, "used between open and close"
        return self._session

    async def _control(
        self, method: str, path: str, *, body: Mapping[str, Any] | None = None, wait_s: float = 0.0
    ) -> Any:
        url = f"{self._control_url}{path}"
        return await self._ask(method, url, headers=self._control_headers, body=body, wait_s=wait_s)

    async def _ask(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: Mapping[str, Any] | None = None,
        wait_s: float = 0.0,
        expects_json: bool = True,
    ) -> Any:
        """The JSON of a 200. Raises UpstreamError with the address and what was wrong."""
        place = url.partition("?")[0]
        given = dict(headers) if body is None else {**headers, "Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(self._settings.control_timeout_s + wait_s),
                self._open_session.request(method, url, headers=given, json=body) as response,
            ):
                raw = await response.read()
                if response.status != 200:
                    raise UpstreamError(f"{place}: expected status 200, got {response.status}")
                return await response.json(content_type=None) if raw and expects_json else None
        except TimeoutError as exc:
            raise UpstreamError(f"{place}: no answer in time") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise UpstreamError(f"{place}: {_describe(exc)}") from exc
        except ValueError as exc:
            raise UpstreamError(f"{place}: the answer is not JSON") from exc

    @contextmanager
    def _checked(self, path: str) -> Iterator[None]:
        try:
            yield
        except WireError as exc:
            raise UpstreamError(f"{self._control_url}{path}: {exc}") from exc


def _bearer(variable: str) -> dict[str, str]:
    secret = os.environ.get(variable)
    return {"Authorization": f"Bearer {secret}"} if secret else {}


def _describe(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
