"""The traffic of `bench load`: a closed loop of clients over one sequence of requests, and its figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from delta_tree import TokenIds
from kvshare.bench.harness import milliseconds
from kvshare.bench.vllm.client import Answer, Client
from kvshare.bench.vllm.prompts import near_duplicate, stranger
from kvshare.bench.vllm.stack import BenchConfig


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request of a sequence. `is_near`: of a donor that was served before; None where nobody says."""

    prompt: TokenIds
    max_tokens: int
    is_near: bool | None


@dataclass(frozen=True, kw_only=True)
class Config(BenchConfig):
    """The traffic of `bench load`. Output lengths are even in [min_output, max_output]."""

    concurrency: int = 8
    requests: int = 32  # per arm and repeat, mixed
    prompt_tokens: int = 2000
    changed: float = 0.1
    edits: int = 5
    families: int = 4  # popular prompts
    min_output: int = 16
    max_output: int = 32
    repeats: int = 1
    workload: Path | None = None  # a file whose prompts take the place of made-up ones

    @property
    def unrelated_requests(self) -> int:
        return max(self.concurrency, self.requests // 2)

    def to_json(self) -> dict[str, Any]:
        return {**super().to_json(), "unrelated_requests": self.unrelated_requests}

    def draw_output(self, rng: np.random.Generator) -> int:
        """The length of one answer."""
        return int(rng.integers(self.min_output, self.max_output + 1))


def new_sequence(
    rng: np.random.Generator, config: Config, donors: Sequence[TokenIds], *, num_requests: int
) -> list[Request]:
    """Shuffled; half are edits of evenly drawn donors, if there are any; none is asked twice."""
    num_near = round(num_requests / 2) if donors else 0
    requests = []
    for number in range(num_requests):
        if is_near := number < num_near:
            donor = donors[number % len(donors)]
            prompt = near_duplicate(rng, donor, changed=config.changed, edits=config.edits)
        else:
            prompt = stranger(rng, config.prompt_tokens)
        requests.append(Request(prompt, config.draw_output(rng), is_near))
    return [requests[index] for index in rng.permutation(num_requests)]


def given_sequence(rng: np.random.Generator, config: Config, prompts: Sequence[TokenIds]) -> list[Request]:
    """These prompts in their order; only how long the answers are is drawn."""
    return [Request(prompt, config.draw_output(rng), is_near=None) for prompt in prompts]


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a sequence: all answers in its order, and how long it took."""

    requests: Sequence[Request]
    answers: Sequence[Answer]
    seconds: float

    @property
    def completed_per_s(self) -> float:
        return len(self.answers) / self.seconds

    def ttft_s(self, *, is_near: bool | None = None) -> list[float]:
        return [
            answer.ttft_s
            for request, answer in zip(self.requests, self.answers, strict=True)
            if is_near is None or request.is_near is is_near
        ]

    @property
    def gaps_s(self) -> list[float]:
        return [gap for answer in self.answers for gap in answer.gaps_s]


async def play(client: Client, requests: Sequence[Request], *, concurrency: int) -> Load:
    """Every client asks for the next request as soon as its last one is answered."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(requests))

    async def one_client() -> None:
        for index, request in waiting:
            answers[index] = await client.complete(request.prompt, max_tokens=request.max_tokens)

    began = time.perf_counter()
    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    seconds = time.perf_counter() - began
    return Load(requests, [answers[index] for index in range(len(requests))], seconds)


def figures(loads: Sequence[Load]) -> dict[str, Any]:
    """Of one arm over all repeats."""
    kinds = {"all": None, "near": True, "unrelated": False}
    ttft = {name: [s for load in loads for s in load.ttft_s(is_near=kind)] for name, kind in kinds.items()}
    gaps = [gap for load in loads for gap in load.gaps_s]
    return {
        "requests": sum(len(load.answers) for load in loads),
        "completed_per_s": [load.completed_per_s for load in loads],
        "ttft": {name: milliseconds(values) for name, values in ttft.items() if values},
        "inter_token": milliseconds(gaps) if gaps else None,
    }
