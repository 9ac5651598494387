"""What only the Edge backend does: live on disk, survive, notice damage, optimise aside."""

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from numpy.typing import NDArray

from vector_index import (
    Entry,
    Hit,
    IndexPausedError,
    IndexSchema,
    IndexSchemaError,
    IndexUnavailableError,
    QdrantEdgeIndex,
    edge_shard,
)

SLOWLY = "import time; time.sleep(0.5)\n"


def prints(*values: int) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def exit_status(program: str) -> int:
    return subprocess.run([sys.executable, "-c", program], check=False).returncode


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def filled(folder: Path, schema: IndexSchema) -> None:
    """Leave a closed index with one prompt in the folder."""
    index = QdrantEdgeIndex(schema, folder)
    await index.open()
    await index.upsert([Entry(1, "a", prints(1, 2), np.ones(8, dtype=np.float32))])
    await index.close()


async def test_the_index_survives_a_restart(tmp_path: Path, schema: IndexSchema) -> None:
    """What was stored before close is found after open."""
    await filled(tmp_path, schema)
    index = QdrantEdgeIndex(schema, tmp_path)
    await index.open()
    assert await index.search_fingerprints("a", prints(2), 5) == [Hit(1, 1.0)]
    await index.close()


async def test_the_index_survives_a_kill(tmp_path: Path, schema: IndexSchema) -> None:
    """The write-ahead log brings back what was never flushed."""
    program = f"""
import asyncio, os, numpy as np
from pathlib import Path
from vector_index import Entry, IndexSchema, QdrantEdgeIndex
async def main():
    index = QdrantEdgeIndex(IndexSchema(**{asdict(schema)!r}), Path({str(tmp_path)!r}))
    await index.open()
    await index.upsert([Entry(i, "a", np.array([i], np.uint32)) for i in range(100)])
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    assert exit_status(program) == -9
    index = QdrantEdgeIndex(schema, tmp_path)
    await index.open()
    assert await index.count("a") == 100
    await index.close()


@pytest.mark.parametrize("change", [{"embedder": "other"}, {"dimension": 16}, {"kgram": 8}])
async def test_another_schema_is_refused(tmp_path: Path, schema: IndexSchema, change: dict[str, Any]) -> None:
    """Other vectors mean nothing here: the message names the field, recreate starts afresh."""
    await filled(tmp_path, schema)
    other = IndexSchema(**{**asdict(schema), **change})
    index = QdrantEdgeIndex(other, tmp_path)
    with pytest.raises(IndexSchemaError, match=next(iter(change))):
        await index.open()
    await index.recreate()
    assert await index.count() == 0
    await index.close()


@pytest.mark.parametrize("victim", ["segment.json", "edge_config.json", "open-1", "tracker.dat"])
async def test_a_damaged_index_is_unavailable_and_can_be_recreated(
    tmp_path: Path, schema: IndexSchema, victim: str
) -> None:
    """Damage, a native panic included, raises our error; recreate gives an empty index."""
    await filled(tmp_path, schema)
    for path in (tmp_path / "shard").rglob(victim):
        path.write_bytes(b"\xff" * min(path.stat().st_size, 4096))
    index = QdrantEdgeIndex(schema, tmp_path)
    with pytest.raises(IndexUnavailableError, match="recreate"):
        await index.open()
    await index.recreate()
    await index.upsert([Entry(5, "a", prints(1))])
    assert await index.count() == 1
    await index.close()


async def test_a_missing_stamp_is_a_schema_error(tmp_path: Path, schema: IndexSchema) -> None:
    """A shard without a stamp is not read."""
    await filled(tmp_path, schema)
    (tmp_path / "schema.json").unlink()
    with pytest.raises(IndexSchemaError, match="no schema stamp"):
        await QdrantEdgeIndex(schema, tmp_path).open()


async def test_a_folder_in_use_is_left_alone(tmp_path: Path, schema: IndexSchema) -> None:
    """A second opener is refused, and may not recreate the index under the first one."""
    first, second = (QdrantEdgeIndex(schema, tmp_path) for _ in range(2))
    await first.open()
    with pytest.raises(IndexUnavailableError):
        await second.open()
    with pytest.raises(IndexUnavailableError, match="another process"):
        await second.recreate()
    await first.upsert([Entry(1, "a", prints(1))])
    assert await first.count() == 1
    await first.close()


async def test_a_temporary_index_leaves_nothing_behind(
    tmp_path: Path, schema: IndexSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a folder the files live in the temporary directory until close."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    index = QdrantEdgeIndex(schema)
    await index.open()
    assert names_in(tmp_path)
    await index.close()
    assert not names_in(tmp_path)


async def test_an_index_without_embedder_has_no_dense_vectors(tmp_path: Path) -> None:
    """Dimension 0 keeps fingerprints only and refuses embeddings."""
    index = QdrantEdgeIndex(IndexSchema(kgram=4, window=4, max_fingerprints=9), tmp_path)
    await index.open()
    await index.upsert([Entry(1, "a", prints(1))])
    assert await index.search_fingerprints("a", prints(1), 5) == [Hit(1, 1.0)]
    with pytest.raises(IndexSchemaError):
        await index.search_embedding("a", np.ones(8, dtype=np.float32), 5, 0.5)
    await index.close()


async def test_optimising_leaves_the_loop_free_and_loses_nothing(
    tmp_path: Path, schema: IndexSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a child optimises, searches are unavailable and writes are put off at once and do not wait."""
    monkeypatch.setattr(edge_shard, "OPTIMISE", SLOWLY + edge_shard.OPTIMISE)
    index = QdrantEdgeIndex(schema, tmp_path, optimise_after=10)
    await index.open()
    await index.upsert([Entry(i, "a", prints(i)) for i in range(20)])
    optimising = asyncio.create_task(index.maintain())
    await asyncio.sleep(0.05)
    with pytest.raises(IndexUnavailableError):
        await index.search_fingerprints("a", prints(1), 5)
    assert index.why_paused() is not None
    with pytest.raises(IndexPausedError):
        await index.upsert([Entry(20, "a", prints(20))])
    with pytest.raises(IndexPausedError):
        await index.delete("a", [3])
    await optimising
    assert index.why_paused() is None
    await index.upsert([Entry(20, "a", prints(20))])
    assert await index.count("a") == 21
    assert await index.search_fingerprints("a", prints(20), 5) == [Hit(20, 1.0)]
    await index.close()


async def test_what_could_not_be_opened_after_optimising_is_opened_later(
    tmp_path: Path, schema: IndexSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too many open files, say: the next round of maintenance tries again."""
    index = QdrantEdgeIndex(schema, tmp_path)
    await index.open()
    await index.upsert([Entry(1, "a", prints(1))])

    def fail(self: edge_shard.ShardFiles, schema: IndexSchema) -> NoReturn:
        raise IndexUnavailableError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(edge_shard.ShardFiles, "open", fail)
        with pytest.raises(IndexUnavailableError):
            await index.optimise()
    await index.resume()
    assert await index.count("a") == 1
    await index.close()


async def test_segments_are_of_bounded_size(tmp_path: Path, schema: IndexSchema) -> None:
    """The child, which opens the shard as it finds it, knows the limit: it never builds all into one."""
    await filled(tmp_path, schema)
    optimisers = json.loads((tmp_path / "shard" / "edge_config.json").read_text())["optimizers"]
    assert 0 < optimisers["max_segment_size"] < 1_000_000
    assert optimisers["default_segment_number"] > 1


async def test_a_failed_optimise_leaves_the_index_open(
    tmp_path: Path,
    schema: IndexSchema,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A child that fails is logged, and nothing is lost."""
    monkeypatch.setattr(edge_shard, "OPTIMISE", "raise SystemExit(3)")
    index = QdrantEdgeIndex(schema, tmp_path)
    await index.open()
    await index.upsert([Entry(1, "a", prints(1))])
    await index.optimise()
    assert "exit status 3" in caplog.text
    assert await index.count("a") == 1
    await index.close()


async def test_a_cancelled_optimise_leaves_the_index_open(
    tmp_path: Path, schema: IndexSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelling ends the child and opens the shard again."""
    monkeypatch.setattr(edge_shard, "OPTIMISE", SLOWLY + edge_shard.OPTIMISE)
    index = QdrantEdgeIndex(schema, tmp_path)
    await index.open()
    await index.upsert([Entry(1, "a", prints(1))])
    optimising = asyncio.create_task(index.optimise())
    await asyncio.sleep(0.05)
    optimising.cancel()
    with pytest.raises(asyncio.CancelledError):
        await optimising
    assert await index.count("a") == 1
    await index.close()
