"""
`kvshare bench grammar`: what holding answers to a grammar costs.

A real model in the engine answers the same prompt freely and as JSON of a schema, in turns, in one or more
streams. All answers have as many tokens: the schema's list may not end earlier, and the free answer ignores
the end. Only the time in which all streams decode counts.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from kvshare.conversation.chat import Chat
from kvshare.conversation.lark import Grammar
from kvshare.errors import ConfigError, EngineError
from kvshare.requests import SharingMode
from kvshare_lab.bench.figures import interval
from kvshare_lab.bench.harness import Answer, alternate, ask, median, running_engine

_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


async def run(
    *,
    model: str = "default",
    tokens: int = 200,
    repeats: int = 10,
    threads: int | None = None,
    streams: str = "1,8",
) -> dict[str, Any]:
    """
    For each number of streams: tokens a second in both arms, and pair by pair their ratio and what a token
    takes longer. The figures of the first number are those on top.
    """
    numbers = _numbers(streams)
    settings = {
        "model.path": model,
        "index.dense": False,
        "engine.num_threads": threads,
        "engine.max_running": max(numbers),
    }
    # A list of more people than the answer has tokens; no white space, which a model may repeat for ever.
    own = {"minItems": tokens, "x-guidance": {"whitespace_flexible": False}}
    schema = {"type": "array", "items": _TEXTS["person"], **own}
    grammars = {"free": None, "grammar": Grammar(f"start: json\njson: %json {json.dumps(schema)}")}
    async with running_engine(None, settings) as engine:
        prompt = await engine.encode_chat(Chat(({"role": "user", "content": _TEXTS["question"]},)))
        request = partial(ask, engine, prompt.token_ids, mode=SharingMode.OFF, ignore_eos=True)

        async def measure(num_streams: int, arm: str) -> _Measured:
            began = time.process_time()
            answers = (request(max_tokens=tokens, grammar=grammars[arm]) for _ in range(num_streams))
            rate = _rate(await asyncio.gather(*answers))
            return _Measured(rate, 1e3 * (time.process_time() - began) / (num_streams * tokens))

        found = {
            number: _compared(await alternate(list(grammars), repeats, partial(measure, number)))
            for number in numbers
        }
        name = engine.card.model_id
    return {
        "served": name,
        **found[numbers[0]],
        "by_streams": {str(number): figures for number, figures in found.items()},
    }


def _numbers(streams: str) -> list[int]:
    """Raises ConfigError."""
    numbers = [int(part) for part in streams.split(",") if part.strip().isdecimal()]
    if not numbers or len(numbers) != len(streams.split(",")) or 0 in numbers:
        raise ConfigError("--streams", f"expected numbers with commas, such as 1,8; got {streams!r}")
    return numbers


def _rate(answers: Sequence[Answer]) -> float:
    """
    Tokens a second of all streams together, while all of them decode.

    Raises:  EngineError if they never did so at the same time
    """
    times = [answer.token_times_s for answer in answers]
    start, end = max(each[0] for each in times), min(each[-1] for each in times)
    if end <= start:
        raise EngineError("the first answer ended before the last one began; --tokens must be larger")
    return sum(start < each <= end for one in times for each in one) / (end - start)


@dataclass(frozen=True, slots=True)
class _Measured:
    """One arm, once."""

    tokens_per_s: float
    cpu_ms: float  # of this process for a token, prefill included; another process finds the masks


def _compared(measured: Mapping[str, Sequence[_Measured]]) -> dict[str, Any]:
    pairs = list(zip(measured["free"], measured["grammar"], strict=True))
    ratios = [held.tokens_per_s / free.tokens_per_s for free, held in pairs]
    added = [1e3 / held.tokens_per_s - 1e3 / free.tokens_per_s for free, held in pairs]
    added_cpu = [held.cpu_ms - free.cpu_ms for free, held in pairs]
    return {
        "tokens_per_s": {arm: median([one.tokens_per_s for one in found]) for arm, found in measured.items()},
        "ratio": median(ratios),
        "ratio_interval": interval(ratios),
        "added_ms": median(added),  # to each token of any stream
        "added_ms_interval": interval(added),
        "added_cpu_ms": median(added_cpu),
        "added_cpu_ms_interval": interval(added_cpu),
    }
