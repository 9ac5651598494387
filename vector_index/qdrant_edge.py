"""
The index in this process, on disk, by Qdrant Edge. Only this file and `edge_shard.py` import it.

Two measured facts about qdrant-edge-py 0.9 shape this file:
- Every native call holds the GIL until it returns: a thread would add hops (0.08 ms on a search of
  0.22 ms) and free nothing, not even the event loop of a time limit, so all are called directly.
  Searches take 0.05-1 ms, writes go in slices with a turn for the event loop in between, a flush
  takes 10-300 ms by what was written since the last one.
- Optimising takes seconds, in a child process (`edge_shard.py`), while searches here answer
  "unavailable". It is rarely due: it frees deleted points and builds HNSW; fingerprint search is as
  fast without it.

Its files are mapped and sparse. With no room left on ext4 and tmpfs, these end the process by
SIGBUS: upserts, deletions, creating, opening. Flushing raises; the optimiser's child dies. Searching and
closing write nothing and go well. So room is looked at before each of the former (`disk_space.py`).
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import qdrant_edge as edge
from numpy.typing import NDArray

from vector_index.base import Entry, Hit, VectorIndex
from vector_index.disk_space import MIN_FREE_BYTES, DiskSpace, megabytes
from vector_index.edge_shard import ShardFiles, edge_errors
from vector_index.errors import IndexPausedError, IndexUnavailableError
from vector_index.schema import IndexSchema

log = logging.getLogger(__name__)

_EF = 64  # of HNSW, in each segment; 100 find no more
_OVERSAMPLING = 4.0  # nearest by bytes, of which the nearest by the vectors themselves are taken
_SLICE = 16  # points per native write: about 0.6 ms at 120 fingerprints and 384 dimensions


class QdrantEdgeIndex(VectorIndex):
    """
    A Qdrant Edge shard in a folder, or in a temporary folder that `close` removes.

    `optimise_after` is how many writes and deletions make `maintain` optimise. With less than
    `min_free_bytes` of disk, whatever writes raises IndexPausedError; searches go on. An index that could
    not be opened for that reason finds nothing, and `resume` opens it.
    """

    def __init__(
        self,
        schema: IndexSchema,
        folder: Path | None = None,
        *,
        optimise_after: int = 50_000,
        min_free_bytes: int = MIN_FREE_BYTES,
    ) -> None:
        super().__init__(schema)
        self._files = ShardFiles(folder)
        self._optimise_after = optimise_after
        self._num_changes = 0
        self._num_unflushed = 0
        self._shard: edge.EdgeShard | None = None
        self._waits_for_room = False  # to be opened
        self._is_optimising = False
        self._is_optimising_put_off = False
        self._writing = asyncio.Lock()
        self.space = DiskSpace(folder or _temporary_root(), min_free_bytes)

    async def open(self) -> None:
        async with self._writing:
            if self._shard is None:
                self._shard = self._open_shard()

    async def close(self) -> None:
        async with self._writing:
            self._close_shard()
            self._files.remove_temporary()

    def why_paused(self) -> str | None:
        reason = self.space.why_low()
        if reason is None and self._is_optimising:
            return "it is being optimised"
        if reason is None and self._waits_for_room:
            return "it is about to be opened"
        return reason

    async def resume(self) -> None:
        """Open what could not be opened: for want of room, or after it was optimised."""
        async with self._writing:
            if self._shard is None and self.space.why_low() is None:
                self._shard = self._open_shard()

    async def recreate(self) -> None:
        async with self._writing:
            self._close_shard()
            self._files.remove()  # also where there is no room: this may make some
            self._num_changes = 0
            self._shard = self._open_shard()

    async def upsert(self, entries: Sequence[Entry]) -> None:
        self.check_entries(entries)
        self._check_not_optimising()
        async with self._writing:
            for start in range(0, len(entries), _SLICE):
                points = [_point(entry) for entry in entries[start : start + _SLICE]]
                self._update(edge.UpdateOperation.upsert_points(points), len(points))
                await asyncio.sleep(0)

    async def delete(self, namespace: str, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            return
        # By filter, not by id: an id that another namespace owns must survive.
        owned = edge.Filter(must=[_is_in(namespace), edge.HasIdCondition(set(prompt_ids))])
        self._check_not_optimising()
        async with self._writing:
            operation = edge.UpdateOperation.delete_points_by_filter(owned)
            self._update(operation, len(prompt_ids))

    async def search_fingerprints(
        self, namespace: str, fingerprints: NDArray[np.uint32], limit: int
    ) -> list[Hit]:
        if not len(fingerprints):
            return []
        query = edge.Query.Nearest(_sparse(fingerprints), using="sparse")
        return self._search(namespace, query, limit)

    async def search_embedding(
        self,
        namespace: str,
        embedding: NDArray[np.float32],
        limit: int,
        max_distance: float,
    ) -> list[Hit]:
        self.check_embedding(embedding)
        query = edge.Query.Nearest(embedding.tolist(), using="dense")
        rescored = edge.QuantizationSearchParams(rescore=True, oversampling=_OVERSAMPLING)
        params = edge.SearchParams(hnsw_ef=_EF, quantization=rescored)
        return self._search(namespace, query, limit, min_score=1.0 - max_distance, params=params)

    async def count(self, namespace: str | None = None) -> int:
        only = None if namespace is None else edge.Filter(must=[_is_in(namespace)])
        with edge_errors("count"):
            return self._opened().count(edge.CountRequest(exact=True, filter=only))

    async def maintain(self) -> None:
        """Flush what was written (trims the write-ahead log); optimise when much has changed."""
        if self._num_changes >= self._optimise_after and self._has_room_to_optimise():
            await self.optimise()
            return
        async with self._writing:
            if self._num_unflushed:
                self.space.check()
                with edge_errors("flush"):
                    self._opened().flush()
                self._num_unflushed = 0

    async def optimise(self) -> None:
        """
        Free deleted points and build HNSW in a child process; searches are unavailable meanwhile.

        It takes tens of seconds, so the index is paused: nobody waits with a write, and with what it holds.
        Raises:  IndexUnavailableError if the shard cannot be opened again afterwards
        """
        self._is_optimising = True
        try:
            async with self._writing:
                self._opened()
                self.space.check()
                self._close_shard()
                try:
                    await self._files.optimise()
                finally:
                    # Also when cancelled: the index must not stay closed.
                    self._shard = self._open_shard()
                    self._num_changes = 0
        finally:
            self._is_optimising = False

    def _search(
        self,
        namespace: str,
        query: Any,
        limit: int,
        *,
        min_score: float | None = None,
        params: edge.SearchParams | None = None,
    ) -> list[Hit]:
        if self._waits_for_room:
            return []
        request = edge.QueryRequest(
            limit=limit,
            query=query,
            filter=edge.Filter(must=[_is_in(namespace)]),
            with_payload=True,
            score_threshold=min_score,
            params=params,
        )
        with edge_errors("search"):
            found = self._opened().query(request)
        return self.own_hits(
            namespace,
            (((p.payload or {}).get("namespace"), Hit(int(p.id), p.score)) for p in found),
        )

    def _update(self, operation: edge.UpdateOperation, num_changes: int) -> None:
        self.space.check()
        with edge_errors("update"):
            self._opened().update(operation)
        self._num_changes += num_changes
        self._num_unflushed += num_changes

    def _check_not_optimising(self) -> None:
        if self._is_optimising:
            raise IndexPausedError("the Edge index is being optimised")

    def _opened(self) -> edge.EdgeShard:
        if self._waits_for_room:
            raise IndexPausedError("the Edge index waits for room to be opened")
        if self._shard is None:
            raise IndexUnavailableError("the Edge index is not open")
        return self._shard

    def _close_shard(self) -> None:
        shard, self._shard = self._shard, None
        if shard is not None:
            with edge_errors("close"):
                shard.close()
        self._num_unflushed = 0
        self._waits_for_room = False

    def _has_room_to_optimise(self) -> bool:
        """Segments are built anew beside the old ones."""
        needed = self._files.num_bytes()
        has_room = self.space.has_room_for(needed)
        if not has_room and not self._is_optimising_put_off:
            log.warning("the index is not optimised until %s of disk are free for it", megabytes(needed))
        self._is_optimising_put_off = not has_room
        return has_room

    def _open_shard(self) -> edge.EdgeShard:
        self._waits_for_room = True
        self.space.check()
        self._waits_for_room = False
        return self._files.open(self.schema)


def _temporary_root() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # no folder can be written: opening the index will say so
        return Path(os.sep)


def _point(entry: Entry) -> edge.Point:
    vectors: dict[str, Any] = {"sparse": _sparse(entry.fingerprints)}
    if entry.embedding is not None:
        vectors["dense"] = entry.embedding.tolist()
    return edge.Point(entry.prompt_id, vectors, {"namespace": entry.namespace})


def _sparse(fingerprints: NDArray[np.uint32]) -> edge.SparseVector:
    return edge.SparseVector(fingerprints.tolist(), [1.0] * len(fingerprints))


def _is_in(namespace: str) -> edge.FieldCondition:
    return edge.FieldCondition("namespace", match=edge.MatchValue(namespace))
