"""Every backend behind one name, so that all pass one suite; and a nominator whose parts may fail."""

import os
from collections.abc import AsyncIterator
from uuid import uuid4

import pytest
from qdrant_client import AsyncQdrantClient

from tests.vector_index import moody, topics
from tests.vector_index.moody import Setup
from tests.vector_index.topics import TopicEmbedder
from vector_index import IndexSchema, Nominator, QdrantEdgeIndex, QdrantRemoteIndex, VectorIndex

os.environ["HF_HUB_OFFLINE"] = "1"

SCHEMA = IndexSchema(kgram=16, window=32, max_fingerprints=512, embedder="toy", dimension=8)

BACKENDS = ["edge", "local"]
if "QDRANT_URL" in os.environ:
    BACKENDS.append("server")


@pytest.fixture
def schema() -> IndexSchema:
    """Eight dimensions are enough to tell near from far."""
    return SCHEMA


@pytest.fixture(params=BACKENDS)
async def index(request: pytest.FixtureRequest, schema: IndexSchema) -> AsyncIterator[VectorIndex]:
    """An open, empty index of each backend."""
    opened: VectorIndex
    if request.param == "edge":
        opened = QdrantEdgeIndex(schema)
    elif request.param == "local":
        opened = QdrantRemoteIndex(schema, ":memory:")
    else:
        collection = f"kvshare-test-{uuid4().hex}"
        key = os.environ.get("QDRANT_API_KEY")
        url = os.environ["QDRANT_URL"]
        opened = QdrantRemoteIndex(schema, url, api_key=key, collection=collection)
    await opened.open()
    yield opened
    await opened.close()
    if request.param == "server":
        client = AsyncQdrantClient(url=url, api_key=key)
        await client.delete_collection(collection)
        await client.close()


@pytest.fixture
async def setup(request: pytest.FixtureRequest) -> AsyncIterator[Setup]:
    setup = Setup(getattr(request, "param", moody.SETTINGS))
    assert await setup.nominator.remember(1, "a", moody.tokens(1), moody.TEXT) == ()
    yield setup
    setup.embedder.go_on.set()
    setup.nominator.close()


@pytest.fixture
def embedder() -> TopicEmbedder:
    return TopicEmbedder()


@pytest.fixture
async def nominator(embedder: TopicEmbedder) -> AsyncIterator[Nominator]:
    index = QdrantEdgeIndex(topics.SETTINGS.schema(embedder))
    await index.open()
    nominator = Nominator(index, embedder, topics.SETTINGS)
    yield nominator
    nominator.close()
    await index.close()
