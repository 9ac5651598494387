"""
`kvshare bench grammar`: what holding an answer to a grammar costs.

A real model in the engine answers the same prompt freely and as JSON of a schema, in turns. Both answers have
as many tokens: the schema's list may not end earlier, and the free answer ignores the end.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import yaml

from kvshare.bench.figures import interval
from kvshare.bench.harness import alternate, median, running_engine
from kvshare.conversation.chat import Chat
from kvshare.engines.base import Delta, Event, GenerationRequest, Grammar, SamplingParams
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.requests import SharingMode

_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


async def run(
    *, model: str = "default", tokens: int = 200, repeats: int = 10, threads: int | None = None
) -> dict[str, Any]:
    """Decoded tokens a second in both arms, and their ratio, pair by pair."""
    settings = {"model.path": model, "index.dense": False, "engine.num_threads": threads}
    grammars = {"free": None, "grammar": _grammar(tokens)}
    async with running_engine(None, settings) as engine:
        rates = await alternate(
            list(grammars), repeats, lambda arm: _tokens_per_s(engine, tokens, grammars[arm])
        )
        name = engine.card.model_id
    ratios = [held / free for free, held in zip(rates["free"], rates["grammar"], strict=True)]
    return {
        "served": name,
        "tokens_per_s": {arm: median(found) for arm, found in rates.items()},
        "ratio": median(ratios),
        "ratio_interval": interval(ratios),
    }


def _grammar(tokens: int) -> Grammar:
    """A list of more people than the answer has tokens; no white space, which a model may repeat for ever."""
    own = {"minItems": tokens, "x-guidance": {"whitespace_flexible": False}}
    schema = {"type": "array", "items": _TEXTS["person"], **own}
    return Grammar(f"start: json\njson: %json {json.dumps(schema)}")


async def _tokens_per_s(engine: EmbeddedEngine, tokens: int, grammar: Grammar | None) -> float:
    """Behind the first token: prefill and compiling are over by then."""
    came: list[float] = []

    def note(event: Event) -> None:
        if isinstance(event, Delta):
            came.append(time.perf_counter())

    request = GenerationRequest(
        request_id="bench",
        namespace=engine.namespace(tenant="bench", scope="tenant"),
        prompt=await engine.encode_chat(Chat(({"role": "user", "content": _TEXTS["question"]},))),
        sampling=SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, grammar=grammar),
        mode=SharingMode.OFF,
        store=False,
    )
    await engine.generate(request, note)
    await engine.settle()
    return (len(came) - 1) / (came[-1] - came[0])
