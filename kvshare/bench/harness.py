"""What the benchmarks share: a running engine, a timed request, near-duplicates, arms that take turns."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel

from delta_tree import TokenIds, token_ids
from kvshare.conversation.lark import Grammar
from kvshare.demo import MODEL_PATH
from kvshare.engines.base import Delta, Event, Finished, GenerationRequest, SamplingParams, Started
from kvshare.engines.embedded.engine import EmbeddedEngine
from kvshare.engines.embedded.model import EmbeddedModel
from kvshare.engines.embedded.tokenizer import PromptEncoder
from kvshare.errors import ConfigError
from kvshare.requests import SharingMode, SharingReport
from kvshare.served_model import DEMO
from kvshare.settings import Settings, load_settings

T = TypeVar("T")


@asynccontextmanager
async def running_engine(
    model: PreTrainedModel | None = None, overrides: Mapping[str, object] | None = None
) -> AsyncIterator[EmbeddedEngine]:
    """
    An engine with a temporary store, over the given model or else that of the settings (the demo model).

    A given model gets the demo model's tokenizer: a random model needs no more than token ids.
    """

    def load(_: Settings, stopping: threading.Event) -> tuple[EmbeddedModel, PromptEncoder]:
        assert model is not None
        return EmbeddedModel(model, name="bench"), PromptEncoder.load(MODEL_PATH)

    with tempfile.TemporaryDirectory() as folder:
        settings = bench_settings(folder, overrides or {})
        engine = EmbeddedEngine(settings) if model is None else EmbeddedEngine(settings, load=load)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()


def bench_settings(folder: str, overrides: Mapping[str, object]) -> Settings:
    """The default settings with the demo model in float32 and the store in this folder."""
    defaults = {"store.path": folder, "model.path": DEMO, "model.dtype": "float32"}
    return load_settings(overrides={**defaults, **overrides})


@dataclass(frozen=True, slots=True)
class Answer:
    """One request: what was shared, how it ended, and its text."""

    report: SharingReport
    finished: Finished
    token_times_s: Sequence[float]  # since its submission
    text: str

    @property
    def first_token_s(self) -> float:
        return self.token_times_s[0] if self.token_times_s else float("nan")


async def ask(
    engine: EmbeddedEngine,
    tokens: TokenIds,
    *,
    mode: SharingMode,
    tenant: str = "bench",
    store: bool = False,
    max_tokens: int = 1,
    grammar: Grammar | None = None,
    ignore_eos: bool = False,
) -> Answer:
    """One greedy request. It returns when its prompt is stored, so that no arm pays for another's."""
    prompt = await engine.encode_tokens(tokens.tolist())
    request = GenerationRequest(
        request_id="bench",
        namespace=engine.namespace(tenant=tenant, scope="tenant"),
        prompt=prompt,
        sampling=SamplingParams(
            max_tokens=max_tokens, temperature=0.0, grammar=grammar, ignore_eos=ignore_eos
        ),
        mode=mode,
        store=store,
    )
    events: list[tuple[float, Event]] = []
    began = time.perf_counter()
    await engine.generate(request, lambda event: events.append((time.perf_counter() - began, event)))
    await engine.settle()
    deltas = [(seconds, event.text) for seconds, event in events if isinstance(event, Delta)]
    return Answer(
        report=next(event.report for _, event in events if isinstance(event, Started)),
        finished=next(event for _, event in events if isinstance(event, Finished)),
        token_times_s=[seconds for seconds, _ in deltas],
        text="".join(text for _, text in deltas),
    )


def random_prompt(rng: np.random.Generator, num_tokens: int, vocab_size: int) -> TokenIds:
    """Tokens drawn evenly, so that no two stretches are equal by chance."""
    return token_ids(rng.integers(16, vocab_size, num_tokens, dtype=np.int32))


def edited(prompt: TokenIds, *, changed: float, edits: int, draw: Callable[[int], TokenIds]) -> TokenIds:
    """The prompt with a share of its tokens replaced, in `edits` stretches of equal length, evenly spread."""
    tokens = np.array(prompt)
    length = max(1, round(changed * len(tokens) / edits))
    for place in range(1, edits + 1):
        start = place * len(tokens) // (edits + 1) - length // 2
        tokens[start : start + length] = draw(length)
    return token_ids(tokens)


def rounds(arms: Sequence[str], repeats: int, *, warms_up: bool = True) -> Iterator[tuple[bool, list[str]]]:
    """
    The arms of each round. They take turns in coming first, as the later ones find warm caches.

    The boolean says whether the round counts: by default one that does not count comes before the others.
    """
    for number in range(0 if warms_up else 1, repeats + 1):
        yield number > 0, list(arms if number % 2 else reversed(arms))


async def alternate(
    arms: Sequence[str], repeats: int, measure: Callable[[str], Awaitable[T]]
) -> dict[str, list[T]]:
    """What `measure` returns of each arm, one entry per repeat, in `rounds` after one that warms up."""
    found: dict[str, list[T]] = {arm: [] for arm in arms}
    for counts, order in rounds(arms, repeats):
        for arm in order:
            measured = await measure(arm)
            if counts:
                found[arm].append(measured)
    return found


def chosen(names: str, known: Collection[str], option: str) -> list[str]:
    """
    Names with commas, in their order.

    Raises:  ConfigError, which names the option, for a name that is not known
    """
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(option, f"there are {', '.join(known)}; got {unknown[0]!r}")
    return wanted


def median(values: Sequence[float]) -> float:
    return float(np.median(np.asarray(values)))


def environment() -> dict[str, object]:
    """What a figure depends on besides the code."""
    return {"torch": torch.__version__, "num_threads": torch.get_num_threads(), "device": "cpu"}
