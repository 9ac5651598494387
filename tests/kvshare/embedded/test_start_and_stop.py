"""The embedded engine's start on a store, and its stop."""

import asyncio
import os
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvshare.embedded.model import EmbeddedModel
from kvshare.errors import (
    EngineError,
    ShuttingDownError,
    StoreError,
)
from kvshare.settings import Settings
from tests.kvshare.embedded.tiny_engine import engine_at, events, prompt, request, stored, stream


async def test_a_restart_forgets_prompts_whose_kv_is_gone(tmp_path: Path) -> None:
    """Without a disk tier KV dies with the process; what pointed to it leaves at the next start."""
    engine = engine_at(tmp_path, **{"store.disk_bytes": 0})
    await engine.start()
    await stored(engine, prompt(200))
    assert engine.status().num_nodes == 1
    await engine.stop()
    again = engine_at(tmp_path, **{"store.disk_bytes": 0})
    await again.start()
    try:
        assert again.status().num_nodes == 0
        answer = await stored(again, prompt(200))
        assert answer.report is not None
        assert answer.report.num_cached == 0
    finally:
        await again.stop()


async def test_the_store_of_another_model_is_moved_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Never wrong KV, and never no server: the other model begins a store of its own."""
    first = engine_at(tmp_path)
    await first.start()
    await stored(first, prompt(200))
    await first.stop()
    other = engine_at(tmp_path, seed=1)
    await other.start()
    answer = await stored(other, prompt(200))
    assert answer.report is not None
    assert answer.report.num_cached == 0
    await other.stop()
    assert (tmp_path / "tree.sqlite3.old").exists()
    assert "another model" in caplog.text


async def test_a_store_in_use_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    """Two servers on one store are a mistake; whoever makes it does not wait for the weights."""
    first = engine_at(tmp_path)
    await first.start()
    second = engine_at(tmp_path)

    def fail(_: Settings, stopping: threading.Event) -> NoReturn:
        raise AssertionError("the model was loaded")

    second._load = fail
    with pytest.raises(StoreError, match="another process has this store open"):
        await second.start()
    await first.stop()


async def test_no_store_at_all_shares_as_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`store.path: null`: nothing in the working directory, and a temporary index that goes at the end."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.chdir(tmp_path)
    no_store: dict[str, Any] = {"store.path": None}
    engine = engine_at(tmp_path, **no_store)
    await engine.start()
    assert list((tmp_path / "temporary").glob("kvshare-index-*"))
    await stored(engine, prompt(200))
    answer = await stored(engine, prompt(200))
    assert answer.report is not None
    assert answer.report.num_cached == 199
    await engine.stop()
    assert [folder for folder, _, _ in os.walk(tmp_path)] == [str(tmp_path), str(tmp_path / "temporary")]


async def test_a_start_that_fails_leaves_the_store_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever was opened is closed again, so that the next start in this process works."""
    broken = engine_at(tmp_path)

    def fail(model: EmbeddedModel) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("kvshare.embedded.server._warm_up", fail)  # the last step of a start
        with pytest.raises(RuntimeError, match="out of memory"):
            await broken.start()
    again = engine_at(tmp_path)
    await again.start()
    await again.stop()


async def test_stopping_ends_what_runs_and_what_waits(tmp_path: Path) -> None:
    """Nobody hangs: running requests fail, waiting ones are told that the engine stops."""
    engine = engine_at(tmp_path, **{"engine.max_running": 1})
    await engine.start()
    running = stream(engine, await request(engine, prompt(60), max_tokens=900))
    await anext(running)
    await anext(running)
    waiting = asyncio.create_task(events(engine, await request(engine, prompt(60, seed=1))))
    await asyncio.sleep(0.05)
    await engine.stop()
    with pytest.raises(EngineError):
        async for _ in running:
            pass
    with pytest.raises(ShuttingDownError):
        await asyncio.wait_for(waiting, 60)
