"""The server's index: what it does when it cannot be opened as configured."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from qdrant_client import AsyncQdrantClient

from kvshare import served_index
from kvshare.errors import ConfigError
from kvshare.served_index import ServedIndex
from kvshare.settings import load_settings
from tests.proxy.conftest import eventually
from vector_index import QdrantRemoteIndex

_DEAD = "http://127.0.0.1:9"  # nothing listens there


def index_of(store: Path | None = None, **given: Any) -> ServedIndex:
    settings = load_settings()
    return ServedIndex(
        settings.index.model_copy(update={"dense": False, "search_timeout_s": 60.0, **given}),
        settings.store.model_copy(update={"path": None if store is None else str(store)}),
    )


async def test_a_server_without_an_address_is_refused() -> None:
    """The key is named, and what it should be."""
    with pytest.raises(ConfigError, match=r"index\.url.*'server'"):
        await index_of(backend="server", url=None).open([])


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
async def test_a_server_that_is_away_is_tried_again_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts without it; when Qdrant answers, the index opens, what is forgotten is deleted."""
    monkeypatch.setattr(served_index, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(served_index, "_MAINTAIN_EVERY", 1)
    tries: list[str] = []

    def connect(_: QdrantRemoteIndex) -> AsyncQdrantClient:
        tries.append("now" if len(tries) >= 3 else "away")
        location = ":memory:" if tries[-1] == "now" else _DEAD
        return AsyncQdrantClient(location, timeout=2, check_compatibility=False)

    monkeypatch.setattr(QdrantRemoteIndex, "_connect", connect)
    index = index_of(backend="server", url=_DEAD)
    with caplog.at_level(logging.WARNING):
        await index.open([("a", 1), ("a", 2), ("b", 3)])
        try:
            await eventually(lambda: "the index is open" in caplog.text)
        finally:
            await index.close()
    assert tries == ["away"] * 3 + ["now"]
    assert caplog.text.count("cannot be opened") == 1
    assert index.status().paused is None


async def test_a_folder_that_cannot_be_written_means_a_temporary_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged, and the index works."""
    (tmp_path / "file").write_text("no folder")
    index = index_of(tmp_path / "file" / "store", backend="edge")
    with caplog.at_level(logging.WARNING):
        await index.open([])
    status = index.status()
    await index.close()
    assert "the index is in a temporary folder" in caplog.text
    assert (status.paused, status.free_bytes is None) == (None, False)


@pytest.mark.filterwarnings("ignore:Payload indexes have no effect in the local Qdrant")
async def test_an_index_that_cannot_be_optimised_is_logged_twice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once when it begins, with what to do, and once when it is over; not at each try."""
    monkeypatch.setattr(served_index, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(served_index, "_MAINTAIN_EVERY", 1)
    outcomes = [OSError("disk"), OSError("disk"), OSError("disk")]

    async def maintain(_: QdrantRemoteIndex) -> None:
        if outcomes:
            raise outcomes.pop()

    monkeypatch.setattr(QdrantRemoteIndex, "maintain", maintain)
    index = index_of(backend="memory")
    await index.open([])
    try:
        await eventually(lambda: "can be optimised again" in caplog.text)
    finally:
        await index.close()
    failed, works = caplog.messages
    assert "could not be optimised: disk" in failed
    assert "restart the server" in failed
    assert works == "the index can be optimised again"


async def test_an_embedder_that_cannot_be_loaded_means_no_semantic_search(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts are still found by their tokens, and the log says what is off."""
    index = index_of(backend="memory", dense=True, embedder=str(tmp_path / "nothing"))
    with caplog.at_level(logging.WARNING):
        await index.open([])
    await index.close()
    assert index.embedder is None
    assert "search by embedding is off" in caplog.text


async def test_without_the_extra_for_embeddings_the_log_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A proxy in front of vLLM needs no torch, unless it searches by embedding."""
    monkeypatch.setattr(served_index, "missing_modules", lambda extra: ["torch"])
    index = index_of(backend="memory", dense=True)
    with caplog.at_level(logging.WARNING):
        await index.open([])
    await index.close()
    assert index.embedder is None
    assert "torch is not installed" in caplog.text


async def test_an_index_whose_files_are_deleted_is_made_anew_and_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a restart: new files, one warning, and one line when it is whole."""
    monkeypatch.setattr(served_index, "_LOOK_EVERY_S", 0.01)
    index = index_of(tmp_path, backend="edge")
    prompt = np.random.default_rng(1).integers(0, 500, 300).astype(np.int32)

    async def refill() -> None:
        await index.nominator.remember(1, "ns", prompt)

    await index.open([])
    index.refill = refill
    try:
        await refill()
        shutil.rmtree(tmp_path / "index")
        await eventually(lambda: "the index is whole again" in caplog.text)
        another = np.concatenate([prompt[:3][::-1], prompt[3:]])
        found = await index.nominator.nominate("ns", another, None, allow_dense=False)
        assert [each.prompt_id for each in found.candidates] == [1]
        assert (tmp_path / "index" / "shard" / "wal").exists()
        problems = {reading.part: reading.problem for reading in index.parts()}
    finally:
        await index.close()
    assert set(problems.values()) == {None}
    assert caplog.text.count("the files of the index are gone") == 1
