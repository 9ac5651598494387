"""An embedded engine with a tiny model, and requests to it."""

import asyncio
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare.demo import MODEL_PATH
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.embedded.model import EmbeddedModel
from kvshare.embedded.tokenizer import PromptEncoder
from kvshare.engine import (
    Delta,
    Event,
    Finished,
    GenerationRequest,
    SamplingParams,
    Started,
)
from kvshare.requests import SharingMode, SharingReport
from kvshare.settings import Settings, load_settings
from kvshare_lab.bench.harness import Answer, ask
from kvshare_lab.bench.random_models import tiny_model

VOCAB = 290


def prompt(length: int, seed: int = 0) -> TokenIds:
    return token_ids(np.random.default_rng(seed).integers(16, VOCAB, length))


def engine_at(path: Path, *, seed: int = 0, **overrides: object) -> EmbeddedEngine:
    """A tiny Llama behind the demo model's tokenizer. What is planned does not depend on times."""
    defaults: dict[str, object] = {
        "index.dense": False,
        "index.search_timeout_s": 60.0,
        "cost.min_saved_s": -3600.0,
        "cost.min_saved_fraction": 0.0,
        "cost.measure_at_start": False,
        "cost.learn": False,
        "control.unshared_share": 0.0,
        "sharing.max_risk": 1.0,
    }
    settings = load_settings(overrides={"store.path": str(path), **defaults, **overrides})

    def load(_: Settings, stopping: threading.Event) -> tuple[EmbeddedModel, PromptEncoder]:
        return EmbeddedModel(tiny_model("llama", seed=seed), name="tiny"), PromptEncoder.load(MODEL_PATH)

    return EmbeddedEngine(settings, load=load)


async def request(
    engine: EmbeddedEngine, tokens: TokenIds, *, tenant: str = "t", **sampling: Any
) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        namespace=engine.namespace(tenant=tenant, scope="tenant"),
        prompt=await engine.encode_tokens(tokens.tolist()),
        sampling=SamplingParams(**{"max_tokens": 8, "temperature": 0.0, **sampling}),
    )


async def stream(engine: EmbeddedEngine, wanted: GenerationRequest) -> AsyncGenerator[Event, None]:
    """The events of a request as they come; closing it cancels the request."""
    queue: asyncio.Queue[Event | None] = asyncio.Queue()
    running = asyncio.create_task(engine.generate(wanted, queue.put_nowait))
    running.add_done_callback(lambda _: queue.put_nowait(None))
    try:
        while (event := await queue.get()) is not None:
            yield event
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def events(engine: EmbeddedEngine, wanted: GenerationRequest) -> list[Event]:
    found = [event async for event in stream(engine, wanted)]
    await engine.settle()
    return found


def report_of(event: Event) -> SharingReport:
    assert isinstance(event, Started | Finished)
    return event.report


def tokens_of(found: list[Event]) -> list[str]:
    return [event.text for event in found if isinstance(event, Delta)]


async def stored(engine: EmbeddedEngine, tokens: TokenIds, *, max_tokens: int = 1) -> Answer:
    return await ask(engine, tokens, mode=SharingMode.APPROX, tenant="t", store=True, max_tokens=max_tokens)
