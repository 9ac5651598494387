"""
`kvshare bench ttft`: time to first token of a prompt of which a stored one differs in a few places.

Arms, alternating in one process, on a random-weight Llama of about 100 M parameters and random tokens, or on
a given model and real text:
    full           nothing is shared
    shared         KVShare: nomination, planning, laying out, rotation and partial attention included
    exact_prefix   only the tokens before the first difference, what a prefix cache gets
    ideal          a prompt of which all but as many last tokens as `shared` computed is an exact prefix
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare.bench.harness import Answer, ask, edited, environment, median, random_prompt, running_engine
from kvshare.bench.random_models import timing_model
from kvshare.chat_model import EXAMPLE_TEXT
from kvshare.demo.pairs import near_duplicate_pairs
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.errors import ConfigError
from kvshare.requests import SharingMode

_FORMS = 64  # behind the example text
_VOCAB_SIZE = 1000  # of the tokens drawn; the model's own is larger


async def run(
    *,
    prompt_tokens: int = 2000,
    changed: float = 0.1,
    edits: int = 5,
    repeats: int = 5,
    seed: int = 0,
    model: str | None = None,
    family: str = "llama",
) -> dict[str, Any]:
    """
    Medians over `repeats` recipients, each new to the store. `model`: what `model.path` may be; None: random
    weights in float32, of a `family` of `kvshare.bench.random_models`.

    Raises:  ConfigError for prompts longer than the real text is, and for an unknown family; ModelError
    """
    rng = np.random.default_rng(seed)
    arms: dict[str, list[Answer]] = {"full": [], "shared": [], "exact_prefix": [], "ideal": []}
    given = {} if model is None else {"model.path": model, "model.dtype": "auto"}
    random_model = None
    if model is None:
        length = prompt_tokens + 64
        random_model = timing_model(family, max_position_embeddings=length, vocab_size=16384, seed=seed)
    async with running_engine(random_model, given) as engine:
        donor, draw = _text(engine, rng, prompt_tokens, is_real=model is not None)
        await ask(engine, donor, mode=SharingMode.OFF, store=True)
        for repeat in range(repeats + 1):
            recipient = edited(donor, changed=changed, edits=edits, draw=draw)
            full = await ask(engine, recipient, mode=SharingMode.OFF)
            shared = await ask(engine, recipient, mode=SharingMode.APPROX)
            prefix = await ask(engine, recipient, mode=SharingMode.EXACT)
            computed = shared.report.num_recomputed + shared.report.num_repaired
            same_head = token_ids(np.concatenate([donor[: prompt_tokens - computed], draw(computed)]))
            ideal = await ask(engine, same_head, mode=SharingMode.EXACT)
            if repeat == 0:
                continue  # caches and allocator are warm from here on
            for name, answer in zip(arms, (full, shared, prefix, ideal), strict=True):
                arms[name].append(answer)
        dtype = str(engine.server.model.layout.dtype).removeprefix("torch.")
        name = engine.server.model.name if model else f"random weights, 100 M, {family}"
    return {
        "engine": "embedded",
        "model": name,
        "dtype": dtype,
        **_summary(arms, prompt_tokens),
        "environment": environment(),
    }


def _text(
    engine: EmbeddedEngine, rng: np.random.Generator, num_tokens: int, *, is_real: bool
) -> tuple[TokenIds, Callable[[int], TokenIds]]:
    """The donor, and what draws other tokens: at random, or from the example text and our own forms."""
    if not is_real:
        return random_prompt(rng, num_tokens, _VOCAB_SIZE), lambda n: random_prompt(rng, n, _VOCAB_SIZE)
    pairs = [next(near_duplicate_pairs(seed=number, count=1)) for number in range(_FORMS)]
    forms = ["\n\n" + pair.donor_messages[-1]["content"] for pair in pairs]
    texts = [EXAMPLE_TEXT.read_text(encoding="utf-8"), *forms]
    tokens = np.concatenate([engine.server.encoder.encode_text(text).token_ids for text in texts])
    if len(tokens) < 2 * num_tokens:
        problem = f"prompts of real text have at most {len(tokens) // 2:,} tokens, got {num_tokens:,}"
        raise ConfigError("--prompt-tokens", problem)
    others = tokens[num_tokens:]

    def draw(length: int) -> TokenIds:
        start = int(rng.integers(len(others) - length + 1))
        return token_ids(others[start : start + length])

    return token_ids(tokens[:num_tokens]), draw


def _summary(arms: dict[str, list[Answer]], num_tokens: int) -> dict[str, Any]:
    ttft = {name: median([answer.first_token_s for answer in answers]) for name, answers in arms.items()}
    last = arms["shared"][-1]
    report = last.report
    return {
        "speedup": ttft["full"] / ttft["shared"],
        "ideal_speedup": ttft["full"] / ttft["ideal"],
        "of_ideal": ttft["ideal"] / ttft["shared"],
        "exact_prefix_speedup": ttft["full"] / ttft["exact_prefix"],
        "recomputed_fraction": (report.num_recomputed + report.num_repaired) / num_tokens,
        "tokens": {
            "exact": report.num_exact,
            "copied": report.num_copied,
            "recomputed": report.num_recomputed,
            "repaired": report.num_repaired,
        },
        "decision": report.decision,
        "median_ttft_s": ttft,
        "shared_stage_ms": {stage: 1e3 * value for stage, value in last.finished.stage_seconds.items()},
    }
