"""
`kvshare bench grammar`: what holding an answer to a grammar costs.

A real model in the engine answers the same prompt freely and as JSON of a schema, in turns. Both answers have
as many tokens: the schema's list may not end earlier, and the free answer ignores the end.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from kvshare.bench.figures import interval
from kvshare.bench.harness import alternate, ask, median, running_engine
from kvshare.conversation.chat import Chat
from kvshare.conversation.lark import Grammar
from kvshare.requests import SharingMode

_TEXTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


async def run(
    *, model: str = "default", tokens: int = 200, repeats: int = 10, threads: int | None = None
) -> dict[str, Any]:
    """Decoded tokens a second in both arms, and their ratio, pair by pair."""
    settings = {"model.path": model, "index.dense": False, "engine.num_threads": threads}
    # A list of more people than the answer has tokens; no white space, which a model may repeat for ever.
    own = {"minItems": tokens, "x-guidance": {"whitespace_flexible": False}}
    schema = {"type": "array", "items": _TEXTS["person"], **own}
    grammars = {"free": None, "grammar": Grammar(f"start: json\njson: %json {json.dumps(schema)}")}
    async with running_engine(None, settings) as engine:
        prompt = await engine.encode_chat(Chat(({"role": "user", "content": _TEXTS["question"]},)))
        request = partial(ask, engine, prompt.token_ids, mode=SharingMode.OFF, ignore_eos=True)

        async def tokens_per_s(arm: str) -> float:
            """After the first token, when prefill and compiling are over."""
            times = (await request(max_tokens=tokens, grammar=grammars[arm])).token_times_s
            return (len(times) - 1) / (times[-1] - times[0])

        rates = await alternate(list(grammars), repeats, tokens_per_s)
        name = engine.card.model_id
    ratios = [held / free for free, held in zip(rates["free"], rates["grammar"], strict=True)]
    return {
        "served": name,
        "tokens_per_s": {arm: median(found) for arm, found in rates.items()},
        "ratio": median(ratios),
        "ratio_interval": interval(ratios),
    }
