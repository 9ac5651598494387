"""What only the Edge backend does: files of its own, which may be damaged, and optimising aside."""

import asyncio
import json
from pathlib import Path
from typing import NoReturn

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


def entry(prompt_id: int) -> Entry:
    return Entry(prompt_id, "a", prints(prompt_id), np.ones(8, dtype=np.float32))


async def is_found(index: QdrantEdgeIndex) -> bool:
    return bool(await index.search_embedding("a", np.ones(8, dtype=np.float32), 5, 0.5))


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def filled(folder: Path, schema: IndexSchema) -> QdrantEdgeIndex:
    """A closed index with one prompt in the folder."""
    index = QdrantEdgeIndex(schema, folder)
    await index.open()
    await index.upsert([entry(1)])
    await index.close()
    return index


async def test_a_closed_index_can_be_opened_again(tmp_path: Path, schema: IndexSchema) -> None:
    """It finds what it found before, by fingerprints and by embedding."""
    index = await filled(tmp_path, schema)
    await index.open()
    assert await index.search_fingerprints("a", prints(1), 5) == [Hit(1, 1.0)]
    assert await is_found(index)
    await index.close()


async def test_what_another_process_has_left_is_deleted(tmp_path: Path, schema: IndexSchema) -> None:
    """A server fills its index from the tree: an index of before has nothing to say."""
    await filled(tmp_path, schema)
    index = QdrantEdgeIndex(schema, tmp_path)
    await index.open()
    assert await index.count() == 0
    assert not await is_found(index)
    await index.close()


async def test_a_prompt_without_embedding_leaves_the_files_alone(tmp_path: Path, schema: IndexSchema) -> None:
    """Only embeddings are written to disk, and one that a prompt has no more leaves it."""
    index = await filled(tmp_path, schema)
    await index.open()
    await index.upsert([Entry(2, "a", prints(2))])
    assert await index.count() == 2
    await index.upsert([Entry(1, "a", prints(3))])
    assert not await is_found(index)
    assert await index.search_fingerprints("a", prints(1, 2, 3), 5) == [Hit(1, 1.0), Hit(2, 1.0)]
    await index.close()


@pytest.mark.parametrize("victim", ["segment.json", "edge_config.json", "open-1", "tracker.dat"])
async def test_a_damaged_index_is_unavailable_and_can_be_recreated(
    tmp_path: Path, schema: IndexSchema, victim: str
) -> None:
    """Damage, a native panic included, raises our error; recreate gives an empty index."""
    index = await filled(tmp_path, schema)
    for path in (tmp_path / "shard").rglob(victim):
        path.write_bytes(b"\xff" * min(path.stat().st_size, 4096))
    with pytest.raises(IndexUnavailableError, match="recreate"):
        await index.open()
    await index.recreate()
    await index.upsert([Entry(5, "a", prints(1))])
    assert await index.count() == 1
    await index.close()


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
    """While a child optimises, fingerprints are found, embeddings are not; writes are put off at once."""
    monkeypatch.setattr(edge_shard, "OPTIMISE", SLOWLY + edge_shard.OPTIMISE)
    index = QdrantEdgeIndex(schema, tmp_path, optimise_after=10)
    await index.open()
    await index.upsert([entry(i) for i in range(20)])
    optimising = asyncio.create_task(index.maintain())
    await asyncio.sleep(0.05)
    with pytest.raises(IndexUnavailableError):
        await is_found(index)
    assert await index.search_fingerprints("a", prints(1), 5) == [Hit(1, 1.0)]
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
    index = await filled(tmp_path, schema)
    await index.open()

    def fail(self: edge_shard.ShardFiles, schema: IndexSchema) -> NoReturn:
        raise IndexUnavailableError("too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(edge_shard.ShardFiles, "open", fail)
        with pytest.raises(IndexUnavailableError):
            await index.optimise()
    with pytest.raises(IndexUnavailableError):
        await is_found(index)
    await index.resume()
    assert await is_found(index)
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


async def test_forgotten_prompts_make_room(
    tmp_path: Path, schema: IndexSchema, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where most are forgotten, maintenance frees their memory and loses nothing else."""
    monkeypatch.setattr("vector_index.postings._YOUNG", 4)
    index = QdrantEdgeIndex(schema, tmp_path)
    await index.open()
    await index.upsert([Entry(i, "a", prints(i, 1000)) for i in range(20)])
    await index.delete("a", list(range(1, 20)))
    assert index._postings.is_worth_compacting
    await index.maintain()
    assert not index._postings.is_worth_compacting
    assert await index.search_fingerprints("a", prints(0, 1000), 5) == [Hit(0, 2.0)]
    assert await index.search_fingerprints("a", prints(7), 5) == []
    await index.close()
