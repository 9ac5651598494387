"""
`kvshare bench grammar`: what holding an answer to a grammar costs.

The same prompt, answered in turns freely and as JSON of a schema, by a real model in the engine. Both answers
have as many tokens: the schema's list may not end earlier, and the free one ignores the end.
"""

from __future__ import annotations

import json
import time
from typing import Any

from kvshare.bench.figures import interval
from kvshare.bench.harness import median, rounds, running_engine
from kvshare.conversation.chat import Chat
from kvshare.engines.base import Delta, Event, GenerationRequest, Grammar, SamplingParams
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.requests import SharingMode

_QUESTION = Chat(({"role": "user", "content": "Write down the people of a small town, as JSON."},))
_PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "work": {"enum": ["baker", "doctor", "farmer", "teacher"]},
        "address": {"anyOf": [{"type": "string", "maxLength": 60}, {"type": "null"}]},
    },
    "required": ["name", "age", "work", "address"],
    "additionalProperties": False,
}


async def run(
    *, model: str = "default", tokens: int = 200, repeats: int = 10, threads: int | None = None
) -> dict[str, Any]:
    """Decoded tokens a second in both arms, and their ratio, pair by pair."""
    rates: dict[str, list[float]] = {"free": [], "grammar": []}
    settings = {"model.path": model, "index.dense": False, "engine.num_threads": threads}
    async with running_engine(None, settings) as engine:
        samplings = {"free": _sampling(tokens), "grammar": _sampling(tokens, _grammar(tokens))}
        for counts, arms in rounds(list(samplings), repeats):
            for arm in arms:
                rate = await _rate(engine, samplings[arm])
                if counts:
                    rates[arm].append(rate)
        name = engine.card.model_id
    ratios = [held / free for free, held in zip(rates["free"], rates["grammar"], strict=True)]
    return {
        "served": name,
        "tokens_per_s": {arm: median(found) for arm, found in rates.items()},
        "ratio": median(ratios),
        "ratio_interval": interval(ratios),
    }


def _sampling(tokens: int, grammar: Grammar | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, grammar=grammar)


def _grammar(tokens: int) -> Grammar:
    """A list of people that is longer than the answer; without white space that a model may add for ever."""
    schema = {
        "type": "array",
        "items": _PERSON,
        "minItems": tokens,
        "x-guidance": {"whitespace_flexible": False},
    }
    return Grammar(f"start: json\njson: %json {json.dumps(schema)}")


async def _rate(engine: EmbeddedEngine, sampling: SamplingParams) -> float:
    """Tokens a second behind the first one: prefill and compiling are over then."""
    came: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, Delta):
            came.append(time.perf_counter())

    request = GenerationRequest(
        request_id="bench",
        namespace=engine.namespace(tenant="bench", scope="tenant"),
        prompt=await engine.encode_chat(_QUESTION),
        sampling=sampling,
        mode=SharingMode.OFF,
        store=False,
    )
    await engine.generate(request, note)
    await engine.settle()
    return (len(came) - 1) / (came[-1] - came[0])
