"""
One server over a real socket: streamed completions with their times, as a user would measure, and metrics.

Prompts are sent as token ids, so that every server gets the same ones. Answers are greedy and of a fixed
length unless the request is aborted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from delta_tree import TokenIds
from kvshare.errors import EngineError
from kvshare.http_client import events
from kvshare_lab.vllm.servers import MODEL_NAME

_MOST_RESETS, _RESET_S = 50, 0.1  # tries to empty a prefix cache, and the pause after one


@dataclass(slots=True)
class Answer:
    """One answered request. Times are seconds since it was sent."""

    sent_at_s: float = 0.0  # by `time.perf_counter`
    token_times_s: list[float] = field(default_factory=list)  # one for each chunk with tokens
    token_ids: list[int] = field(default_factory=list)  # these three only if asked for
    logprobs: list[float] = field(default_factory=list)
    tops: list[Mapping[int, float]] = field(default_factory=list)  # the likeliest tokens
    usage: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
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
        """For each token: the log-probability of the first choice less that of the second."""
        ordered = (sorted(top.values(), reverse=True) for top in self.tops)
        return [best[0] - best[1] for best in ordered]

    @property
    def num_cached(self) -> int:
        """Prompt tokens that the server reports as not computed."""
        return int((self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    def add(self, chunk: Mapping[str, Any]) -> None:
        """Take in one document of the stream, which came now."""
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.token_times_s.append(time.perf_counter() - self.sent_at_s)
            logprobs = choice.get("logprobs") or {}
            for token in logprobs.get("content") or ():  # of a chat
                self.token_ids.append(_token_id(token["token"]))
                self.logprobs.append(token["logprob"])
                self.tops.append({_token_id(top["token"]): top["logprob"] for top in token["top_logprobs"]})
            if "tokens" in logprobs:
                self.token_ids += map(_token_id, logprobs["tokens"])
                self.logprobs += logprobs["token_logprobs"]
                self.tops += [
                    {_token_id(token): value for token, value in top.items()}
                    for top in logprobs["top_logprobs"]
                ]


@dataclass(frozen=True, slots=True)
class Counters:
    """All samples of a `/metrics` page, by name and labels."""

    samples: Mapping[tuple[str, frozenset[tuple[str, str]]], float]

    def by(self, name: str, *labels: str) -> dict[str, float]:
        """Sums of the samples of that name, by the values of these labels."""
        found: defaultdict[str, float] = defaultdict(float)
        for (sample, pairs), value in self.samples.items():
            if sample == name:
                values = dict(pairs)
                found[": ".join(values[label] for label in labels if values[label])] += value
        return dict(found)

    def total(self, name: str) -> float:
        return sum(self.by(name).values())

    def since(self, before: Counters) -> Counters:
        return Counters({key: value - before.samples.get(key, 0.0) for key, value in self.samples.items()})

    @property
    def stage_ms(self) -> dict[str, float]:
        """Mean milliseconds per stage of the proxy's requests."""
        seconds = self.by("kvshare_stage_duration_seconds_sum", "stage")
        counts = self.by("kvshare_stage_duration_seconds_count", "stage")
        return {stage: 1e3 * seconds[stage] / count for stage, count in counts.items() if count}


class Client:
    """Requests to one server, over as many connections as there are requests at a time."""

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
        keys of the body. `abort_after`: hang up after so many chunks. `on_chunk`: called with the number
        of chunks so far.

        Raises:  EngineError for an HTTP error, a stream that fails or ends early, or another number of tokens
        """
        body = {
            "model": MODEL_NAME,
            "prompt": prompt.tolist(),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"logprobs": num_top, "return_tokens_as_token_ids": True} if num_top else {}),
            **(extra or {}),
        }
        return await self._answer("/v1/completions", body, abort_after, on_chunk)

    async def chat(
        self,
        content: str | Sequence[Mapping[str, Any]],
        *,
        max_tokens: int = 1,
        num_top: int = 0,
        extra: Mapping[str, Any] | None = None,
        abort_after: int | None = None,
    ) -> Answer:
        """The same of a chat with one message, which the server renders and tokenizes."""
        tops = {"logprobs": True, "top_logprobs": num_top, "return_tokens_as_token_ids": True}
        body = {
            "model": MODEL_NAME,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **(tops if num_top else {}),
            **(extra or {}),
        }
        return await self._answer("/v1/chat/completions", body, abort_after)

    async def _answer(
        self,
        path: str,
        body: Mapping[str, Any],
        abort_after: int | None = None,
        on_chunk: Callable[[int], None] | None = None,
    ) -> Answer:
        max_tokens, answer, ended = body["max_tokens"], Answer(sent_at_s=time.perf_counter()), False
        try:
            async with self._session.post(path, json=body) as response:
                if response.status != 200:
                    await _text(response)
                answer.headers = response.headers
                async for chunk in events(response):
                    if chunk is None:
                        ended = True
                        continue
                    if "error" in chunk:
                        raise EngineError(f"the stream failed: {chunk['error']}")
                    answer.add(chunk)
                    num_chunks = len(answer.token_times_s)
                    if on_chunk is not None:
                        on_chunk(num_chunks)
                    if abort_after is not None and num_chunks >= abort_after:
                        answer.aborted = True
                        response.close()
                        return answer
        except aiohttp.ClientError as exc:
            raise EngineError(f"the connection broke: {exc}") from exc
        num_tokens = answer.usage.get("completion_tokens")
        if not ended or not answer.token_times_s or num_tokens != max_tokens:
            found = f"{num_tokens} in {len(answer.token_times_s)} chunks{'' if ended else ', without [DONE]'}"
            raise EngineError(f"expected a stream of {max_tokens} tokens, got {found}")
        return answer

    async def counters(self) -> Counters:
        """The metrics of the proxy, or of a vLLM."""
        families = text_string_to_metric_families(await self.fetch("/metrics"))
        samples = (sample for family in families for sample in family.samples)
        return Counters({(each.name, frozenset(each.labels.items())): each.value for each in samples})

    async def block_size(self) -> int:
        """Tokens per block of a vLLM's prefix cache."""
        sizes = (await self.counters()).by("vllm:cache_config_info", "block_size")
        return int(next(iter(sizes)))

    async def num_blocks(self) -> int:
        """Of a vLLM's KV cache."""
        counts = (await self.counters()).by("vllm:cache_config_info", "num_gpu_blocks")
        return int(next(iter(counts)))

    async def forget_prefixes(self) -> None:
        """
        Empty a vLLM's prefix cache: what its blocks have is found no more, and what a connector stores stays.

        Raises:  EngineError if the vLLM was not started with `is_resettable`, or its blocks stay in use
        """
        for _ in range(_MOST_RESETS):
            if json.loads(await self.fetch("/reset_prefix_cache", {}))["success"]:
                return
            await asyncio.sleep(_RESET_S)
        raise EngineError("vLLM did not empty its prefix cache: blocks stay in use")

    async def fetch(self, path: str, document: Mapping[str, Any] | None = None) -> str:
        """The answer to a GET, or to a POST of a document. Raises EngineError."""
        method = "GET" if document is None else "POST"
        async with self._session.request(method, path, json=document) as response:
            return await _text(response)


async def _text(response: aiohttp.ClientResponse) -> str:
    """Raises EngineError, with the beginning of the answer, unless the status is 200."""
    text = await response.text()
    if response.status != 200:
        raise EngineError(f"HTTP {response.status}: {text[:300]}")
    return text


def _token_id(text: str) -> int:
    """As vLLM writes it with `return_tokens_as_token_ids`."""
    return int(text.removeprefix("token_id:"))
