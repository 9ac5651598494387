"""Some answers are computed once more in full: what that finds, and what it leaves alone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from delta_tree import TokenIds, token_ids
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.embedded.recording import Recording
from kvshare.embedded.shadows import Shadows
from kvshare.engine import Started
from kvshare.kv.sequence import SequenceKV
from kvshare.reasons import Reason
from kvshare.requests import Decision, Prediction, SharingReport
from kvshare.settings import load_settings
from kvshare.status import ShadowStatus
from tests.kvshare.embedded.tiny_engine import engine_at, events, prompt, request, stored

ALWAYS = {"control.shadow_share": 1.0, "sharing.max_deviation": 100.0}


def edited(number: int) -> TokenIds:
    """A prompt of 400 tokens with another one near its beginning."""
    tokens = np.array(prompt(400))
    tokens[20] = 16 + number
    return token_ids(tokens)


async def shadow_of(
    engine: EmbeddedEngine, tokens: TokenIds, **sampling: Any
) -> tuple[Started, ShadowStatus]:
    """A request's first event, and the figures once its shadow is computed."""
    started = (await events(engine, await request(engine, tokens, **sampling)))[0]
    assert isinstance(started, Started)
    figures = engine.status().shadow
    assert figures is not None
    return started, figures


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[EmbeddedEngine]:
    """An engine that has stored one prompt."""
    engine = engine_at(path, **ALWAYS)  # type: ignore[arg-type]  # none is the seed
    await engine.start()
    try:
        await stored(engine, prompt(400))
        yield engine
    finally:
        await engine.stop()


async def test_an_approximate_answer_is_compared_with_a_full_prefill(tmp_path: Path) -> None:
    """The figures have what was found and what was expected; the request has its own. Nothing is stored."""
    async with running(tmp_path) as engine:
        started, figures = await shadow_of(engine, edited(1), max_tokens=20)
        assert started.report.decision is Decision.APPROX
        assert figures.num_compared == 1
        assert started.stored.deviation == figures.measured == figures.largest
        assert figures.measured > 0
        assert started.report.prediction is not None
        assert figures.expected == started.report.prediction.expected
        assert len(list(engine.sharing.tree.nodes())) == 2


async def test_wrong_kv_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies whose rows have the wrong sign deviate by far more than right ones."""
    write_copies = SequenceKV.write_copies

    def wrong(kv: SequenceKV, *given: Any, **options: Any) -> int:
        num_bytes = write_copies(kv, *given, **options)
        for plane in kv.planes:
            plane.mul_(-1)
        return num_bytes

    async with running(tmp_path) as engine:
        right, _ = await shadow_of(engine, edited(1))
        monkeypatch.setattr(SequenceKV, "write_copies", wrong)
        mistaken, _ = await shadow_of(engine, edited(2))
    assert right.stored.deviation is not None
    assert mistaken.stored.deviation is not None
    assert mistaken.stored.deviation > 10 * right.stored.deviation


async def test_other_answers_have_no_shadow(tmp_path: Path) -> None:
    """Neither those from an equal prefix or in full, nor any once none is asked for."""
    async with running(tmp_path) as engine:
        for tokens in (prompt(400), prompt(300, seed=9)):
            started, figures = await shadow_of(engine, tokens)
            assert started.report.decision is not Decision.APPROX
            assert (figures.num_compared, started.stored.deviation) == (0, None)
        engine.reconfigure(load_settings(overrides={"control.shadow_share": 0.0}))
        started, figures = await shadow_of(engine, edited(3))
        assert started.report.decision is Decision.APPROX
        assert (figures.share, figures.num_compared) == (0.0, 0)


@pytest.mark.parametrize(("drawn", "is_chosen"), [(0.09, True), (0.1, False)])
def test_a_share_is_chosen(drawn: float, is_chosen: bool) -> None:
    """Of the approximate answers; without a prediction there is nothing to compare with."""
    shadows = Shadows(0.1, draw=lambda: drawn)
    prediction = Prediction(0.01, 0.02, 0.0, 0.05, "windows", 0)
    approximate = SharingReport(0, 90, 10, 0, Decision.APPROX, prediction=prediction)
    refused = replace(approximate, decision=Decision.FULL, reason=Reason.DEVIATES_TOO_MUCH)
    assert (shadows.recording(approximate) is not None) is is_chosen
    assert shadows.recording(refused) is None
    assert shadows.recording(replace(approximate, prediction=None)) is None


def test_a_recording_has_the_first_tokens() -> None:
    recording = Recording()
    for token in range(20):
        recording.note(token, torch.zeros(4))
    assert recording.token_ids == list(range(16))
    torch.testing.assert_close(recording.logprobs[0].exp(), torch.full((4,), 0.25))


async def test_a_stop_ends_a_shadow(tmp_path: Path) -> None:
    """The engine stops while one is computed, or is about to be: without an error."""
    async with running(tmp_path) as engine:
        await engine.generate(await request(engine, edited(1)), lambda event: None)
    assert engine._shadows.status().num_compared <= 1
