"""
What the benchmarks share: a running engine or server, a timed request, near-duplicates, arms that take turns.
"""

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from aiohttp import ClientTimeout
from aiohttp.test_utils import TestClient, TestServer
from transformers import PreTrainedModel

from delta_tree import TokenIds, token_ids
from kvshare.conversation.lark import Grammar
from kvshare.demo import MODEL_PATH
from kvshare.embedded.decoder import DecoderModel
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.embedded.model import EmbeddedModel
from kvshare.embedded.server import load_model
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.engine import (
    Delta,
    Event,
    Finished,
    GenerationRequest,
    SamplingParams,
)
from kvshare.errors import ConfigError, EngineError
from kvshare.requests import SharingMode, SharingReport
from kvshare.served_model import DEMO
from kvshare.settings import Settings, load_settings
from proxy.app import build_app

Client = TestClient[Any, Any]
T = TypeVar("T")


@asynccontextmanager
async def running_engine(
    model: PreTrainedModel | None = None, overrides: Mapping[str, object] | None = None
) -> AsyncIterator[EmbeddedEngine]:
    """
    An engine with a temporary store, over the given model or else that of the settings (the demo model).

    A given model gets the demo model's tokenizer: a random model needs no more than token ids.
    """

    def load(settings: Settings, stopping: threading.Event) -> tuple[DecoderModel[Any], PromptEncoder]:
        if model is None:
            return load_model(settings, stopping)
        return EmbeddedModel(model, name="bench"), PromptEncoder.load(MODEL_PATH)

    with tempfile.TemporaryDirectory() as folder:
        engine = EmbeddedEngine(bench_settings(folder, overrides or {}), load=load)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.stop()


@asynccontextmanager
async def serving(overrides: Mapping[str, object]) -> AsyncIterator[tuple[Client, EmbeddedEngine]]:
    """The front over an engine with an empty store: its client, and the engine. Raises EngineError."""
    patient = ClientTimeout(total=None)  # a long prompt takes minutes on a busy machine
    with tempfile.TemporaryDirectory() as folder:
        settings = bench_settings(folder, overrides)
        engine = EmbeddedEngine(settings)
        async with TestClient(TestServer(build_app(settings, engine)), timeout=patient) as client:
            while (status := await (await client.get("/ready")).json())["status"] != "ready":
                if status["status"] == "failed":
                    raise EngineError(f"the server did not start: {status['detail']}")
                await asyncio.sleep(0.1)
            yield client, engine


def bench_settings(folder: str, overrides: Mapping[str, object]) -> Settings:
    """
    Defaults with the demo model in float32, without a controller, this store, and the overrides that are not
    None.
    """
    defaults: dict[str, object] = {
        "store.path": folder,
        "model.path": DEMO,
        "model.dtype": "float32",
        "control.unshared_share": 0.0,  # a benchmark compares by itself
        "cost.measure_at_start": False,  # costs are learned from its requests
    }
    given = {key: value for key, value in overrides.items() if value is not None}
    return load_settings(overrides={**defaults, **given})


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
    sampling = SamplingParams(max_tokens, temperature=0.0, grammar=grammar, ignore_eos=ignore_eos)
    namespace = engine.namespace(tenant=tenant, scope="tenant")
    request = GenerationRequest("bench", namespace, prompt, sampling, mode=mode, store=store)
    events: list[tuple[float, Event]] = []
    began = time.perf_counter()
    await engine.generate(request, lambda event: events.append((time.perf_counter() - began, event)))
    await engine.settle()
    deltas = [(seconds, event) for seconds, event in events if isinstance(event, Delta)]
    finished = next(event for _, event in events if isinstance(event, Finished))
    return Answer(
        report=finished.report,
        finished=finished,
        token_times_s=[seconds for seconds, delta in deltas if delta.num_tokens],
        text="".join(delta.text for _, delta in deltas),
    )


async def timed(work: Awaitable[T]) -> tuple[T, float]:
    """What it returns, and the seconds until then."""
    began = time.perf_counter()
    found = await work
    return found, time.perf_counter() - began


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
    """Names with commas, in their order. Raises ConfigError, with the option, for one that is not known."""
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(option, f"there are {', '.join(known)}; got {unknown[0]!r}")
    return wanted


class AnyAbove:
    """For `listed`: all numbers above a bound."""

    def __init__(self, bound: float) -> None:
        self._bound = bound

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int | float) and number > self._bound

    def __str__(self) -> str:
        return f"number above {self._bound:g}"


def listed(option: str, text: str, kind: Any, allowed: Any) -> list[Any]:
    """
    What is given with commas, as that kind: any of `allowed`, or where that is None numbers from 0 to 1.

    Raises:  ConfigError, with the option
    """
    try:
        found = [kind(each) for each in text.split(",") if each.strip()]
    except ValueError:
        found = []
    if not found or any(each not in allowed if allowed is not None else not 0 <= each <= 1 for each in found):
        expected = "numbers from 0 to 1" if allowed is None else f"any of {_shown(allowed)}"
        raise ConfigError(option, f"expected {expected}, with commas, got {text!r}")
    return found


def _shown(allowed: Any) -> str:
    if isinstance(allowed, AnyAbove):
        return str(allowed)
    if isinstance(allowed, range):
        return f"{allowed.start} to {allowed.stop - 1} tokens"
    return ", ".join(allowed)


def median(values: Sequence[float]) -> float:
    return float(np.median(np.asarray(values)))


def environment() -> dict[str, object]:
    """What a figure depends on besides the code."""
    return {"torch": torch.__version__, "num_threads": torch.get_num_threads(), "device": "cpu"}
