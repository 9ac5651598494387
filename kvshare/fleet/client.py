"""
The HTTP clients of vLLM and of the connector's control server. No other module calls them.

The environment has two secrets: KVSHARE_VLLM_API_KEY is vLLM's API key, KVSHARE_VLLM_TOKEN is the key of the
control servers. A client's own key is never passed on.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import aiohttp
from yarl import URL

from delta_tree import SegmentId
from kvshare.addresses import SERVER_NAME
from kvshare.errors import UpstreamError, WrongServerError
from kvshare.fleet.rendered_media import read_media
from kvshare.fleet.token_lists import TokenList, read_entries
from kvshare.settings import VllmSettings
from kvshare.vllm_protocol.json_fields import Message, WireError
from kvshare.vllm_protocol.media import Medium
from kvshare.vllm_protocol.messages import TOKEN_VARIABLE, Journal
from kvshare.vllm_protocol.places import HeldSegments
from kvshare.vllm_protocol.replica_info import ReplicaInfo

_KEEP_ALIVE_S = 2.0  # less than uvicorn's 5: a connection must not be used while vLLM closes it
API_KEY_VARIABLE = "KVSHARE_VLLM_API_KEY"
_LARGE_BODY = 1 << 18  # bytes; larger ones are sent piece by piece
NO_ROUTE = (403, 404, 405)  # `/render` is missing; 403: vLLM has switched it off

Body = Mapping[str, Any] | bytes | None
MessageT = TypeVar("MessageT", bound=Message)


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The base model's names in vLLM's `/v1/models`. Requests for adapters are not shared."""

    names: tuple[str, ...]
    max_model_len: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RenderedPrompt:
    """The tokens that vLLM would compute for a request."""

    tokens: TokenList
    vllm_url: str  # who rendered it
    media: tuple[Medium, ...] | None = ()  # ascending; None if vLLM does not say what and where they are


class _Client:
    """A client of one server, used as a context manager. Calls have timeouts and raise only UpstreamError."""

    _session: aiohttp.ClientSession  # inside the context manager
    _expected: str  # what should answer

    def __init__(self, url: str, secret: str | None, timeout_s: float) -> None:
        self.url = url
        self._headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # bodies are relayed unchanged
            timeout=aiohttp.ClientTimeout(total=None),  # each call has its own
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def _json(self, path: str, *, body: Body = None, wait_s: float = 0.0) -> Any:
        """Return the JSON of an answer with status 200. Raises UpstreamError with address and problem."""
        raw = await self._read(path, body=body, wait_s=wait_s)
        try:
            return json.loads(raw)
        except ValueError as exc:
            raise self._failed(path, "the answer is not JSON") from exc

    async def _read(self, path: str, *, body: Body = None, wait_s: float = 0.0) -> bytes:
        """GET, or POST with a body."""
        method = "GET" if body is None else "POST"
        headers = self._headers if body is None else {**self._headers, "Content-Type": "application/json"}
        data = _sent(json.dumps(body).encode() if isinstance(body, Mapping) else body)
        try:
            async with (
                asyncio.timeout(self._timeout_s + wait_s),
                self._session.request(
                    method, self.url + path, headers=headers, data=data, allow_redirects=False
                ) as response,
            ):
                raw = await response.read()
        except TimeoutError as exc:
            raise self._failed(path, "no answer in time") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise self._failed(path, _describe(exc)) from exc
        if response.headers.get("Server") == SERVER_NAME:
            raise WrongServerError(
                f"{self.url}: a KVShare server answers, this one or another: {self._expected}"
            )
        if response.status != 200:
            problem = f"expected status 200, got {response.status}"
            raise self._failed(path, problem, status=response.status)
        return raw

    def _failed(self, path: str, problem: str, *, status: int | None = None) -> UpstreamError:
        return UpstreamError(f"{self.url}{path.partition('?')[0]}: {problem}", status=status)


class VllmClient(_Client):
    """The API of one `vllm serve`."""

    _expected = "url must be that of a vLLM (vllm.replicas, --vllm-url)"

    def __init__(self, url: str, settings: VllmSettings) -> None:
        super().__init__(url, os.environ.get(API_KEY_VARIABLE), settings.control_timeout_s)
        self._relay_timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=settings.connect_timeout_s, sock_read=settings.read_timeout_s
        )

    async def send(
        self, method: str, raw_path: str, *, headers: Mapping[str, str], body: bytes
    ) -> aiohttp.ClientResponse:
        """
        Relay a request and return when vLLM has sent headers. The caller closes the response.

        Raises:  UpstreamError if the request did not reach vLLM; TimeoutError if vLLM does not answer in time
        """
        request = partial(
            self._session.request,
            method,
            URL(self.url + raw_path, encoded=True),
            headers={**headers, **self._headers},
            timeout=self._relay_timeout,
            allow_redirects=False,
        )
        try:
            try:
                return await request(data=_sent(body))
            except (aiohttp.ServerDisconnectedError, ConnectionResetError):
                # Most likely vLLM was closing this idle connection: try a new one.
                return await request(data=_sent(body))
        except (aiohttp.ClientError, OSError) as exc:
            if isinstance(exc, TimeoutError) and not isinstance(exc, aiohttp.ConnectionTimeoutError):
                raise  # connected, but no answer
            raise UpstreamError(f"{self.url}: {_describe(exc)}") from exc

    async def complete(self, body: Mapping[str, Any], *, headers: Mapping[str, str]) -> float:
        """
        Return the seconds until the first token of a streamed completion, when all of it has come.

        Raises:  UpstreamError; TimeoutError if vLLM does not answer in time
        """
        path, raw = "/v1/completions", json.dumps(body).encode()
        began = time.perf_counter()
        response = await self.send(
            "POST", path, headers={"Content-Type": "application/json", **headers}, body=raw
        )
        try:
            first = await response.content.readany()
            seconds = time.perf_counter() - began
            whole = first + await response.content.read()
        except (aiohttp.ClientError, OSError) as exc:
            raise self._failed(path, _describe(exc)) from exc
        finally:
            response.close()
        if response.status != 200 or not whole.rstrip().endswith(b"[DONE]"):
            raise self._failed(path, f"it was not answered, status {response.status}", status=response.status)
        return seconds

    async def check_health(self) -> None:
        """Raises UpstreamError unless vLLM accepts requests."""
        await self._read("/health")

    async def list_models(self) -> list[Mapping[str, Any]]:
        """Return all that vLLM lists, adapters too."""
        document = await self._json("/v1/models")
        entries = document.get("data") if isinstance(document, Mapping) else None
        if not isinstance(entries, list):
            raise self._failed("/v1/models", "expected a list of models")
        return [entry for entry in entries if isinstance(entry, Mapping)]

    async def models(self) -> ServedModels:
        """Return the base models: those without a parent. An adapter names its base model as parent."""
        base = [entry for entry in await self.list_models() if not entry.get("parent")]
        lengths = [entry["max_model_len"] for entry in base if isinstance(entry.get("max_model_len"), int)]
        return ServedModels(tuple(str(entry.get("id")) for entry in base), min(lengths, default=0))

    async def tokenize(self, body: Mapping[str, Any]) -> TokenList:
        entries = await self._entries("/tokenize", "tokens", body=body)
        if len(entries) != 1:
            raise self._failed("/tokenize", f"expected one object, got {len(entries)}")
        return entries[0][1]

    async def render(self, path: str, body: bytes) -> list[RenderedPrompt]:
        """
        Return the prompts that vLLM would compute for a body sent to `path`, from vLLM's `/render`.

        Raises:  UpstreamError, with a status in NO_ROUTE if vLLM does not have this route
        """
        entries = await self._entries(f"{path}/render", "token_ids", body=body)
        return [
            RenderedPrompt(tokens, self.url, read_media(entry.get("features"))) for entry, tokens in entries
        ]

    async def _entries(
        self, path: str, name: str, *, body: Body
    ) -> list[tuple[Mapping[str, Any], TokenList]]:
        raw = await self._read(path, body=body)
        try:
            return read_entries(raw, name)
        except (ValueError, RecursionError) as exc:
            raise self._failed(path, f"expected {name}, a list of token ids") from exc


class ControlClient(_Client):
    """The client of one connector's control server."""

    _expected = (
        "control_url must be that of the connector in vLLM, by default the port after vLLM's (vllm.replicas, "
        "--vllm-control-url; `kvshare vllm` says it when it starts)"
    )

    def __init__(
        self, url: str, *, token: str | None = None, timeout_s: float = 10.0, proxy: str = ""
    ) -> None:
        """
        `token`: the control server's key; by default that of the environment, if set.
        `proxy`: a random id, of a client that stores and drops KV. The connector logs it if there are two.
        """
        super().__init__(url, token or os.environ.get(TOKEN_VARIABLE), timeout_s)
        self._proxy = proxy

    async def info(self) -> ReplicaInfo:
        """Raises WrongServerError where a KVShare server answers; that is asked for nothing it would log."""
        try:
            await self._read("/health")  # a KVShare server does not log it; a connector has no such route
        except UpstreamError as exc:
            if exc.status is None:
                raise
        return await self._message(ReplicaInfo, "/info")

    async def journal(self, *, after: int, wait_s: float) -> Journal:
        """Events after a sequence number. Waits up to `wait_s` for the first one."""
        path = f"/journal?after={after}&wait_s={wait_s:g}&proxy={self._proxy}"
        return await self._message(Journal, path, wait_s=wait_s)

    async def segments(self) -> HeldSegments:
        return await self._message(HeldSegments, "/segments")

    async def drop(self, segment_ids: Iterable[SegmentId], *, stays_shared: bool = False) -> None:
        """Tell the connector to drop segments. `stays_shared`: those in a shared store stay there."""
        body: dict[str, Any] = {"segment_ids": list(segment_ids)}
        await self._json("/drop", body={**body, "stays_shared": True} if stays_shared else body)

    async def _message(self, kind: type[MessageT], path: str, *, wait_s: float = 0.0) -> MessageT:
        document = await self._json(path, wait_s=wait_s)
        try:
            return kind.from_json(document)
        except WireError as exc:
            raise self._failed(path, str(exc)) from exc


def _sent(body: bytes | None) -> bytes | io.BytesIO | None:
    """Return a body as aiohttp takes it: in one piece, a large one would hold up everything else."""
    return io.BytesIO(body) if body is not None and len(body) > _LARGE_BODY else body or None


def _describe(exc: Exception) -> str:
    return str(exc) or type(exc).__name__
