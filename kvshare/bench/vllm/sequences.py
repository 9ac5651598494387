"""Sequences of requests to one server, in a closed loop of clients or in an open loop, and their results."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.vllm.client import Answer, Client


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a sequence. `is_near`: an edit of a donor that was served before; None if not known."""

    prompt: TokenIds
    max_tokens: int
    is_near: bool | None


@dataclass(frozen=True, slots=True)
class Load:
    """A sequence that was served: all answers in its order, and the seconds it took."""

    requests: Sequence[Request]
    answers: Sequence[Answer]
    seconds: float

    @property
    def completed_per_s(self) -> float:
        return len(self.answers) / self.seconds

    def ttft_s(self, *, is_near: bool | None = None) -> list[float]:
        """Of the near requests, of the others, or of all."""
        pairs = zip(self.requests, self.answers, strict=True)
        return [answer.ttft_s for request, answer in pairs if is_near is None or request.is_near is is_near]


async def play(client: Client, requests: Sequence[Request], *, concurrency: int) -> Load:
    """A closed loop: every client sends the next request as soon as its last one is answered."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(requests))

    async def one_client() -> None:
        for index, request in waiting:
            answers[index] = await client.complete(request.prompt, max_tokens=request.max_tokens)

    began = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    seconds = time.perf_counter() - began
    return Load(requests, [answers[index] for index in range(len(requests))], seconds)


async def play_open(client: Client, requests: Sequence[Request], arrivals_s: Sequence[float]) -> Load:
    """An open loop: each request is sent so long after the start, whatever has been answered by then."""

    async def one(request: Request, after_s: float) -> Answer:
        await asyncio.sleep(after_s)
        return await client.complete(request.prompt, max_tokens=request.max_tokens)

    began = time.perf_counter()
    answers = await asyncio.gather(*map(one, requests, arrivals_s))
    return Load(requests, answers, time.perf_counter() - began)


def poisson_arrivals(rng: np.random.Generator, count: int, *, per_s: float) -> list[float]:
    """Seconds from the start to each of `count` random arrivals, on average `per_s` a second."""
    times: list[float] = np.cumsum(rng.exponential(1 / per_s, count)).tolist()
    return times
