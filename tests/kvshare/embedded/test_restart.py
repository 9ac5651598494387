"""The embedded engine after a restart: KV on disk is served as that in memory is, or not at all."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_tree import TokenIds, token_ids
from kvshare.embedded.engine import EmbeddedEngine
from kvshare.requests import SharingMode
from kvshare.sharing.calibration import FOLDER
from kvshare_lab.bench.harness import Answer, ask
from tests.kvshare.embedded.tiny_engine import engine_at, prompt, stored

DONOR = prompt(300)


@asynccontextmanager
async def running(path: Path, *, seed: int = 0, **settings: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = engine_at(path, seed=seed, **settings)
    await engine.start()
    await engine.settle()
    try:
        yield engine
    finally:
        await engine.stop()


async def asked(engine: EmbeddedEngine, tokens: TokenIds, mode: SharingMode = SharingMode.APPROX) -> Answer:
    return await ask(engine, tokens, mode=mode, tenant="t", max_tokens=8)


def objects(path: Path) -> list[Path]:
    return sorted(path.rglob("*.kv"))


def edited() -> TokenIds:
    tokens = np.array(DONOR)
    tokens[120:124] = 17
    return token_ids(tokens)


async def test_edited_and_equal_prompts_are_answered_from_disk(tmp_path: Path) -> None:
    """As from memory: the same text, the same tokens reused; the second time nothing is read."""
    async with running(tmp_path) as engine:
        await stored(engine, DONOR)
        before = [await asked(engine, tokens) for tokens in (DONOR, edited())]
        full = await asked(engine, DONOR, SharingMode.OFF)
    async with running(tmp_path) as engine:
        assert engine.status().tiers[0].num_segments == 0
        after = [await asked(engine, tokens) for tokens in (edited(), DONOR)][::-1]
        memory, disk = engine.status().tiers
        assert disk.num_hits >= 1
        assert memory.num_hits >= disk.num_hits
    for one, other in zip(before, after, strict=True):
        assert one.text == other.text
        assert one.report.num_cached == other.report.num_cached > 200
    assert full.text == before[0].text


async def test_turns_go_on_after_a_restart(tmp_path: Path) -> None:
    """What is stored then points to what was stored before, and outlives the next restart."""
    longer = token_ids(np.concatenate([DONOR, prompt(60, seed=1)]))
    async with running(tmp_path) as engine:
        await stored(engine, DONOR)
    async with running(tmp_path) as engine:
        answer = await stored(engine, longer)
        assert answer.report.num_exact >= 299
        num_segments = engine.status().num_segments
    async with running(tmp_path) as engine:
        assert (engine.status().num_nodes, engine.status().num_segments) == (2, num_segments)
        assert (await asked(engine, longer)).report.num_exact == len(longer) - 1


def calibration(folder: Path) -> str:
    document = json.loads(next(iter(FOLDER.glob("*.json"))).read_text())
    path = folder / "another.json"
    path.write_text(json.dumps({**document, "longest": document["longest"] + 1}))
    return str(path)


@pytest.mark.parametrize("change", ["weights", "calibration", "off", "dtype of the index"])
async def test_what_was_stored_otherwise_is_not_served(tmp_path: Path, change: str) -> None:
    """Other weights, another calibration, a tier that is off. What KV does not depend on changes nothing."""
    store = tmp_path / "store"
    async with running(store) as engine:
        await stored(engine, DONOR)
    settings: dict[str, Any] = {}
    if change == "calibration":
        settings["sharing.calibration"] = calibration(tmp_path)
    if change == "off":
        settings["store.disk_bytes"] = 0
    if change == "dtype of the index":
        settings["index.kgram"] = 7
    async with running(store, seed=int(change == "weights"), **settings) as engine:
        answer = await asked(engine, DONOR)
        assert (answer.report.num_cached > 0) is (change == "dtype of the index")


async def test_damaged_kv_is_computed_again(tmp_path: Path) -> None:
    """The answer is that of a full prefill, and the damaged file is gone."""
    async with running(tmp_path) as engine:
        full = await asked(engine, DONOR, SharingMode.OFF)
        await stored(engine, DONOR)
    files = objects(tmp_path)
    for path in files[::2]:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 0x40
        path.write_bytes(raw)
    async with running(tmp_path) as engine:
        answer = await asked(engine, DONOR)
        assert answer.text == full.text
    assert not any(path.exists() for path in files[::2])


async def test_what_must_not_be_stored_is_not_on_disk(tmp_path: Path) -> None:
    """A request with `no_store` leaves no file."""
    async with running(tmp_path) as engine:
        await ask(engine, DONOR, mode=SharingMode.APPROX, store=False)
    assert objects(tmp_path) == []
