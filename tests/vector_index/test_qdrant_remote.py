"""What only the remote backend does: meet servers that are away, and check the collection."""

import socket
from dataclasses import replace

import numpy as np
import pytest

from vector_index import (
    IndexSchema,
    IndexSchemaError,
    IndexUnavailableError,
    Nominator,
    QdrantRemoteIndex,
)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


async def test_a_server_that_is_away_is_unavailable(schema: IndexSchema) -> None:
    """Opening raises our error, the index stays closed, and closing it is harmless."""
    index = QdrantRemoteIndex(schema, f"http://127.0.0.1:{free_port()}", timeout_s=2)
    with pytest.raises(IndexUnavailableError, match="could not open"):
        await index.open()
    with pytest.raises(IndexUnavailableError, match="not open"):
        await index.count()
    await index.close()


async def test_a_nominator_lives_without_its_server(schema: IndexSchema) -> None:
    """With an index that could not be opened, nominating and remembering give failures."""
    index = QdrantRemoteIndex(schema, f"http://127.0.0.1:{free_port()}", timeout_s=2)
    nominator = Nominator(index)
    tokens = np.arange(100, dtype=np.int32)
    failures = await nominator.remember(1, "a", tokens)
    assert [failure.component for failure in failures] == ["indexing"]
    nomination = await nominator.nominate("a", tokens, None, allow_dense=False)
    assert [candidate.prompt_id for candidate in nomination.candidates] == [1]
    nominator.close()


async def test_a_collection_of_another_schema_is_refused(schema: IndexSchema) -> None:
    """The stamp is kept with the collection and names the field that differs."""
    index = QdrantRemoteIndex(schema, ":memory:")
    await index.open()
    await index.open()
    index.schema = replace(schema, embedder="other")
    with pytest.raises(IndexSchemaError, match="embedder"):
        await index.open()


async def test_a_collection_without_embedder_holds_fingerprints_only() -> None:
    """Dimension 0 makes a collection without dense vectors."""
    index = QdrantRemoteIndex(IndexSchema(kgram=4, window=4, max_fingerprints=9), ":memory:")
    await index.open()
    assert await index.count() == 0
    await index.close()
