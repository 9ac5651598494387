"""The embedded engine under a controller: what is neither looked up nor stored, and why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from delta_tree import token_ids
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.reasons import Reason
from kvshare.requests import SharingMode
from kvshare.sharing.control import Rung
from tests.kvshare.embedded.tiny_engine import engine_at, events, prompt, report_of, request
from tests.kvshare.sharing.control.on_rung import put_on


@asynccontextmanager
async def running(path: Path, **overrides: object) -> AsyncIterator[EmbeddedEngine]:
    engine = engine_at(path, **overrides)  # type: ignore[arg-type]  # none is the seed
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def num_stored(engine: EmbeddedEngine) -> int:
    return len(list(engine.sharing.tree.nodes()))


async def test_a_block_of_time_without_sharing(tmp_path: Path) -> None:
    """Nothing is looked up and nothing is stored, and requests say why; those that ask to be stored are."""
    own = {"control.unshared_share": 1.0, "control.first_requests": 0}
    async with running(tmp_path, **own) as engine:
        wanted = await request(engine, prompt(200))
        for _ in range(2):
            report = report_of((await events(engine, wanted))[0])
            assert (report.num_cached, report.reason) == (0, Reason.EXPERIMENT)
        assert num_stored(engine) == 0
        await events(engine, replace(wanted, is_controlled=False))
        assert num_stored(engine) == 1
        off = report_of((await events(engine, replace(wanted, mode=SharingMode.OFF)))[0])
        assert off.reason is Reason.OFF
        control = engine.status().control
        assert control is not None
        assert control.num_requests == {"usual": 0, "unshared": 2, "trial": 0}


@pytest.mark.parametrize(
    ("rung", "reason"),
    [
        (Rung.EVERYTHING, Reason.NO_CANDIDATES),
        (Rung.WANTED_SAVES, Reason.NO_CANDIDATES),
        (Rung.DOUBLE, Reason.REDUCED),
        (Rung.NOTHING, Reason.REDUCED),
    ],
)
async def test_a_rung_on_which_less_is_shared(tmp_path: Path, rung: Rung, reason: Reason) -> None:
    """A first prompt is stored on the highest rung only; a short one is not looked up on lower ones."""
    async with running(tmp_path) as engine:
        put_on(engine.server.runtime.control, rung)
        report = report_of((await events(engine, await request(engine, prompt(200))))[0])
        assert report.reason is reason
        assert num_stored(engine) == (rung is Rung.EVERYTHING)


async def test_what_resembles_an_earlier_prompt_is_stored_and_copied(tmp_path: Path) -> None:
    """The first of a family is not stored, the second is, and the third copies from it."""
    async with running(tmp_path) as engine:
        put_on(engine.server.runtime.control, Rung.WANTED_SAVES)
        stored, copied = [], []
        for number in range(3):
            tokens = token_ids(np.concatenate([prompt(600), prompt(20, seed=number + 1)]))
            report = report_of((await events(engine, await request(engine, tokens)))[0])
            stored.append(num_stored(engine))
            copied.append(report.num_cached > 500)
        assert (stored[:2], copied) == ([0, 1], [False, False, True])
