"""
One streamed completion over a real socket, with its times: what a user of the server would measure.

Prompts go as token ids, so that every server sees the same ones. Greedy, of a fixed length unless aborted.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from delta_tree import TokenIds
from kvshare.bench.vllm.servers import MODEL_NAME
from kvshare.errors import EngineError
from kvshare.replay.live_client import events, session


@dataclass(slots=True)
class Answer:
    """What came back of one request. Times are seconds since it was sent."""

    sent_at_s: float = 0.0  # by `time.perf_counter`
    token_times_s: list[float] = field(default_factory=list)  # one per chunk that brings tokens
    token_ids: list[int] = field(default_factory=list)  # these three only if asked for
    logprobs: list[float] = field(default_factory=list)
    tops: list[Mapping[int, float]] = field(default_factory=list)  # the likeliest tokens
    usage: Mapping[str, Any] = field(default_factory=dict)
    aborted: bool = False

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0]

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks; a chunk is a token unless the client reads late."""
        return [after - before for before, after in pairwise(self.token_times_s)]

    @property
    def margins(self) -> list[float]:
        """Per token: the log-probability of the first choice less that of the second."""
        ordered = (sorted(top.values(), reverse=True) for top in self.tops)
        return [best[0] - best[1] for best in ordered]

    @property
    def num_cached(self) -> int:
        """What the server says of prompt tokens that it did not compute."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


class Client:
    """Requests to one server."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def complete(
        self,
        prompt: TokenIds,
        *,
        max_tokens: int = 1,
        num_top: int = 0,
        extra: Mapping[str, Any] | None = None,
        abort_after: int | None = None,
        on_chunk: Callable[[int], None] | None = None,
    ) -> Answer:
        """
        `num_top`: ask for token ids and the log-probabilities of so many of the likeliest. `extra`: further
        keys of the body. `abort_after`: hang up once so many chunks have come. `on_chunk`: is called with
        how many have come.

        Raises:  EngineError if the server refuses, breaks off or sends another number of tokens
        """
        body = {**_body(prompt, max_tokens=max_tokens, num_top=num_top), **(extra or {})}
        answer = Answer(sent_at_s=(began := time.perf_counter()))
        try:
            async with self._session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    await _text(response)
                async for chunk in _chunks(response):
                    _take(answer, chunk, time.perf_counter() - began)
                    if on_chunk is not None:
                        on_chunk(len(answer.token_times_s))
                    if abort_after is not None and len(answer.token_times_s) >= abort_after:
                        answer.aborted = True
                        response.close()
                        break
        except aiohttp.ClientError as exc:
            raise EngineError(f"the connection broke: {exc}") from exc
        _check(answer, max_tokens)
        return answer

    async def get(self, path: str, **parameters: str) -> str:
        async with self._session.get(path, params=parameters) as response:
            return await _text(response)

    async def post(self, path: str, document: Mapping[str, Any]) -> str:
        async with self._session.post(path, json=document) as response:
            return await _text(response)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """A client of its own connections, as many as there are requests at a time."""
    async with session(url, key=None) as own:
        yield Client(own)


def _body(prompt: TokenIds, *, max_tokens: int, num_top: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": prompt.tolist(),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if num_top:
        body |= {"logprobs": num_top, "return_tokens_as_token_ids": True}
    return body


async def _text(response: aiohttp.ClientResponse) -> str:
    """Raises EngineError, with what the server says, unless it is 200."""
    text = await response.text()
    if response.status != 200:
        raise EngineError(f"HTTP {response.status}: {text[:300]}")
    return text


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Mapping[str, Any]]:
    """The documents of an event stream. Raises EngineError for one that says so, or for a missing end."""
    ended = False
    async for document in events(response):
        if document is None:
            ended = True
        elif "error" in document:
            raise EngineError(f"the stream failed: {document['error']}")
        else:
            yield document
    if not ended:
        raise EngineError("the stream ended without [DONE]")


def _take(answer: Answer, chunk: Mapping[str, Any], now_s: float) -> None:
    answer.usage = chunk.get("usage") or answer.usage
    for choice in chunk["choices"]:
        answer.token_times_s.append(now_s)
        logprobs = choice.get("logprobs")
        if not logprobs:
            continue
        answer.token_ids += [_token_id(token) for token in logprobs["tokens"]]
        answer.logprobs += logprobs["token_logprobs"]
        answer.tops += [
            {_token_id(token): value for token, value in top.items()} for top in logprobs["top_logprobs"]
        ]


def _token_id(text: str) -> int:
    """Of what vLLM writes with `return_tokens_as_token_ids`."""
    return int(text.removeprefix("token_id:"))


def _check(answer: Answer, max_tokens: int) -> None:
    if answer.aborted:
        return
    found = answer.usage.get("completion_tokens")
    if not answer.token_times_s or found != max_tokens:
        raise EngineError(f"expected {max_tokens} tokens, got {found} in {len(answer.token_times_s)} chunks")
