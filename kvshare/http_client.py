"""
A client of an OpenAI-shaped server for commands that send it many requests: `kvshare warm`, `kvshare replay
--engine` and the lab's benchmarks. It knows nothing of them.

`ask` streams an answer and reports its times and usage, never its text; the others are the parts that it is
made of. It follows neither proxies nor redirects.
"""

import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from kvshare.errors import UnreachableError, UpstreamError

_SILENCE_S = 600.0  # a stream without a byte for so long is broken
_READ_BUFFER = 2**20  # bytes; the first line of an answer may repeat the prompt


@dataclass(slots=True)
class Answered:
    """The outcome of one request. Times are seconds since it was sent; `error` is a word, or None."""

    ttft_s: float | None = None
    seconds: float = 0.0
    usage: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None


async def served_model(client: aiohttp.ClientSession, url: str) -> str:
    """
    Return the name of the first model that the server at `url` serves.

    Raises:  UnreachableError if no server listens, UpstreamError if its answer is not a list of models
    """
    try:
        async with client.get("v1/models", allow_redirects=False) as response:
            if response.status != 200:
                hint = " (pass an API key with --key)" if response.status in (401, 403) else ""
                raise _no_models(url, f"HTTP status {response.status}{hint}")
            document = await response.json(content_type=None)
        return str(document["data"][0]["id"])
    except aiohttp.ClientConnectorError as exc:
        raise UnreachableError(url, exc.strerror or "no connection") from exc
    except (aiohttp.ClientError, TimeoutError) as exc:
        raise _no_models(url, str(exc) or type(exc).__name__) from exc
    except (ValueError, LookupError, TypeError) as exc:
        raise _no_models(url, "the answer is not a list of models") from exc


def _no_models(url: str, problem: str) -> UpstreamError:
    return UpstreamError(f"{url}v1/models: no model found: {problem}")


async def ask(client: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> Answered:
    """Send one request and read its stream. A failure becomes a word in the answer."""
    answered = Answered()
    began = time.perf_counter()
    try:
        async with client.post(path, json=body, allow_redirects=False) as response:
            if response.status != 200:
                answered.error = f"http_{response.status}"
                with suppress(ValueError):
                    answered.error = error_code(await response.json(content_type=None))
            else:
                await _read(response, answered, began)
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as exc:
        answered.error = type(exc).__name__
    answered.seconds = time.perf_counter() - began
    if answered.error is None and answered.ttft_s is None:
        answered.error = "no_tokens"
    return answered


def session(url: str, *, key: str | None) -> aiohttp.ClientSession:
    """Return a connection for each request in flight, without a limit on how long a stream may take."""
    return aiohttp.ClientSession(
        url,
        headers={} if key is None else {"Authorization": f"Bearer {key}"},
        timeout=aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S),
        connector=aiohttp.TCPConnector(limit=0),
        read_bufsize=_READ_BUFFER,
    )


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any] | None]:
    """
    Yield the documents of an event stream, errors among them; None for its [DONE].

    It is read to its end: servers count a connection that is closed earlier as aborted. Raises ValueError for
    an event that is not JSON.
    """
    async for line in response.content:
        payload = line[5:].strip() if line.startswith(b"data:") else b""
        if payload:
            yield None if payload == b"[DONE]" else json.loads(payload)


async def _read(response: aiohttp.ClientResponse, answered: Answered, began: float) -> None:
    async for document in events(response):
        if document is None:
            continue
        if "error" in document:
            answered.error = error_code(document)
            return
        answered.usage = document.get("usage") or answered.usage
        if answered.ttft_s is None and any(map(_has_tokens, document["choices"])):
            answered.ttft_s = time.perf_counter() - began


def _has_tokens(choice: Mapping[str, Any]) -> bool:
    """Return false for a chat's first chunk, which only names the role, and for half a character."""
    delta = choice.get("delta") or {}
    said = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return bool(said) or choice.get("finish_reason") is not None


def error_code(document: Any) -> str:
    """Return the error's code, a fixed word of the server's. Its message may quote the prompt."""
    error = document.get("error") if isinstance(document, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    word = str(code or "error")
    return word if word.replace("_", "").isalnum() and len(word) <= 40 else "error"
