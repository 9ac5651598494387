"""
The index on a Qdrant server or cluster, or in the client's local mode for tests.

This is the only file that imports `qdrant_client`. The schema is stored as the collection's metadata. The
namespace is a keyword index with `is_tenant`: the server stores the points of a namespace together and
filters before it searches.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict

from qdrant_client import AsyncQdrantClient, models

from vector_index.base import Entry, Hit, IndexSchema, Vector, VectorIndex, VectorName
from vector_index.errors import IndexUnavailableError, backend_errors

LOCAL = ":memory:"
_BATCH = 64  # points per request: about 1 MB at 2,048 fingerprints and 1,024 dimensions


class QdrantRemoteIndex(VectorIndex):
    """
    One collection of a Qdrant server. Prompt ids must be unique among all processes that share it.

    `url` is the server's address, or ":memory:" for the client's local mode, which is pure Python
    and far slower. `timeout_s` limits every request to the server, writes too.
    """

    def __init__(
        self,
        schema: IndexSchema,
        url: str,
        *,
        api_key: str | None = None,
        collection: str = "kvshare",
        timeout_s: int = 10,
    ) -> None:
        super().__init__(schema)
        self._url = url
        self._api_key = api_key
        self._collection = collection
        self._timeout_s = timeout_s
        self._client: AsyncQdrantClient | None = None

    async def open(self) -> None:
        client = self._client or self._connect()
        try:
            with backend_errors("Qdrant", "open"):
                if await client.collection_exists(self._collection):
                    found = await client.get_collection(self._collection)
                    self.schema.check(found.config.metadata)
                else:
                    await self._create(client)
        except BaseException:
            # An index whose schema was not checked stays closed; the caller may try again later.
            self._client = None
            await client.close()
            raise
        self._client = client

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with backend_errors("Qdrant", "close"):
                await client.close()

    async def recreate(self) -> None:
        client = self._client = self._client or self._connect()
        with backend_errors("Qdrant", "recreate"):
            await client.delete_collection(self._collection)
            await self._create(client)

    async def upsert(self, entries: Sequence[Entry]) -> None:
        self.check_entries(entries)
        client = self._opened()
        with backend_errors("Qdrant", "upsert"):
            for start in range(0, len(entries), _BATCH):
                points = [_point(entry) for entry in entries[start : start + _BATCH]]
                await client.upsert(self._collection, points=points, wait=True)

    async def delete(self, namespace: str, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            return
        # By filter, not by id: an id of another namespace must not be deleted.
        chosen = models.HasIdCondition(has_id=list(prompt_ids))
        selector = models.FilterSelector(filter=models.Filter(must=[_is_in(namespace), chosen]))
        client = self._opened()
        with backend_errors("Qdrant", "delete"):
            await client.delete(self._collection, points_selector=selector, wait=True)

    async def _nearest(
        self, namespace: str, name: VectorName, vector: Vector, *, limit: int, min_score: float | None
    ) -> Iterable[tuple[object, Hit]]:
        client = self._opened()
        with backend_errors("Qdrant", "search"):
            response = await client.query_points(
                self._collection,
                query=_sparse(vector) if name == "sparse" else vector.tolist(),
                using=name,
                limit=limit,
                query_filter=models.Filter(must=[_is_in(namespace)]),
                score_threshold=min_score,
                with_payload=["namespace"],
            )
        return (((p.payload or {}).get("namespace"), Hit(int(p.id), p.score)) for p in response.points)

    async def count(self, namespace: str | None = None) -> int:
        only = None if namespace is None else models.Filter(must=[_is_in(namespace)])
        client = self._opened()
        with backend_errors("Qdrant", "count"):
            return (await client.count(self._collection, count_filter=only, exact=True)).count

    async def _create(self, client: AsyncQdrantClient) -> None:
        size = self.schema.dimension
        dense = {"dense": models.VectorParams(size=size, distance=models.Distance.COSINE)}
        # Posting lists are always faster than scanning a namespace's points, see edge_shard.py.
        postings = models.SparseIndexParams(full_scan_threshold=1)
        await client.create_collection(
            self._collection,
            vectors_config=dense if size else {},
            sparse_vectors_config={"sparse": models.SparseVectorParams(index=postings)},
            metadata=asdict(self.schema),
        )
        if self._url != LOCAL:  # local mode has no payload indexes and warns about them
            keyword = models.KeywordIndexParams(type=models.KeywordIndexType.KEYWORD, is_tenant=True)
            await client.create_payload_index(self._collection, "namespace", field_schema=keyword)

    def _connect(self) -> AsyncQdrantClient:
        # The compatibility check would be a blocking request in the constructor.
        return AsyncQdrantClient(
            location=self._url, api_key=self._api_key, timeout=self._timeout_s, check_compatibility=False
        )

    def _opened(self) -> AsyncQdrantClient:
        if self._client is None:
            raise IndexUnavailableError("the Qdrant index is not open; call open() first")
        return self._client


def _point(entry: Entry) -> models.PointStruct:
    vectors: dict[str, models.Vector] = {"sparse": _sparse(entry.fingerprints)}
    if entry.embedding is not None:
        vectors["dense"] = entry.embedding.tolist()
    payload = {"namespace": entry.namespace}
    return models.PointStruct(id=entry.prompt_id, vector=vectors, payload=payload)


def _sparse(fingerprints: Vector) -> models.SparseVector:
    return models.SparseVector(indices=fingerprints.tolist(), values=[1.0] * len(fingerprints))


def _is_in(namespace: str) -> models.FieldCondition:
    return models.FieldCondition(key="namespace", match=models.MatchValue(value=namespace))
