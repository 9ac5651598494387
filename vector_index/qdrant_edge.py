"""
The index in this process, on disk, by Qdrant Edge. Only this file and `edge_shard.py` import it.

Two measured facts about qdrant-edge-py 0.9 shape this file:
- Every native call holds the GIL until it returns. A thread would cost 0.08 ms on a search of 0.22 ms and
  would not free the event loop, so all calls are made directly. Searches take 0.05-1 ms. Writes are cut into
  slices, and the event loop runs between them. A flush takes 10-300 ms, depending on what was written.
- Optimising takes seconds. It runs in a child process (`edge_shard.py`); meanwhile searches raise
  IndexUnavailableError. It is rarely needed: it frees deleted points and builds HNSW. Fingerprint search is
  as fast without it.

The files are sparse and mapped into memory. On a full ext4 or tmpfs, upserting, deleting, creating and
opening end the process by SIGBUS; flushing raises, and the optimising child dies. So free space is checked
before each of these (`disk_space.py`). Searching and closing write nothing and always work.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import qdrant_edge as edge

from vector_index.base import Entry, Hit, IndexSchema, Vector, VectorIndex, VectorName
from vector_index.disk_space import MIN_FREE_BYTES, DiskSpace, megabytes
from vector_index.edge_shard import ShardFiles
from vector_index.errors import IndexPausedError, IndexUnavailableError, backend_errors

log = logging.getLogger(__name__)

_EF = 64  # HNSW's search width in each segment; 100 finds no more
_OVERSAMPLING = 4.0  # times `limit`: the nearest quantised vectors, which are scored again in float32
_SLICE = 16  # points per native write: about 0.6 ms at 120 fingerprints and 384 dimensions
_DELETED = 256  # points per native deletion


class QdrantEdgeIndex(VectorIndex):
    """
    A Qdrant Edge shard in a folder, or in a temporary folder that `close` removes.

    `maintain` optimises after `optimise_after` writes and deletions. With less than `min_free_bytes` of disk
    free, every write raises IndexPausedError, and searches still work. An index that could not be opened for
    that reason finds nothing until `resume` opens it.
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
        self._waits_for_room = False  # it could not be opened, because the disk is full
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

    def has_lost_files(self) -> bool:
        return self._shard is not None and not self._is_optimising and self._files.are_lost()

    async def resume(self) -> None:
        """Open the shard if it could not be opened before: the disk was full, or reopening failed."""
        async with self._writing:
            if self._shard is None and self.space.why_low() is None:
                self._shard = self._open_shard()

    async def recreate(self) -> None:
        async with self._writing:
            self._close_shard()
            self._files.remove()  # even when the disk is full: this may free enough
            self._num_changes = 0
            self._shard = self._open_shard()

    async def upsert(self, entries: Sequence[Entry]) -> None:
        self.check_entries(entries)
        slices = [entries[start : start + _SLICE] for start in range(0, len(entries), _SLICE)]
        await self._write(
            (edge.UpdateOperation.upsert_points([_point(entry) for entry in some]), len(some))
            for some in slices
        )

    async def delete(self, namespace: str, prompt_ids: Sequence[int]) -> None:
        slices = [prompt_ids[at : at + _DELETED] for at in range(0, len(prompt_ids), _DELETED)]
        # By filter, not by id: an id of another namespace must not be deleted.
        owned = [edge.Filter(must=[_is_in(namespace), edge.HasIdCondition(set(ids))]) for ids in slices]
        deletions = map(edge.UpdateOperation.delete_points_by_filter, owned)
        await self._write(zip(deletions, map(len, slices), strict=True))

    async def _nearest(
        self, namespace: str, name: VectorName, vector: Vector, *, limit: int, min_score: float | None
    ) -> Iterable[tuple[object, Hit]]:
        if self._waits_for_room:
            return ()
        rescored = edge.QuantizationSearchParams(rescore=True, oversampling=_OVERSAMPLING)
        request = edge.QueryRequest(
            limit=limit,
            query=edge.Query.Nearest(_sparse(vector) if name == "sparse" else vector.tolist(), using=name),
            filter=edge.Filter(must=[_is_in(namespace)]),
            with_payload=True,
            score_threshold=min_score,
            params=edge.SearchParams(hnsw_ef=_EF, quantization=rescored) if name == "dense" else None,
        )
        with backend_errors("Edge", "search"):
            found = self._opened().query(request)
        return (((p.payload or {}).get("namespace"), Hit(int(p.id), p.score)) for p in found)

    async def count(self, namespace: str | None = None) -> int:
        only = None if namespace is None else edge.Filter(must=[_is_in(namespace)])
        with backend_errors("Edge", "count"):
            return self._opened().count(edge.CountRequest(exact=True, filter=only))

    async def maintain(self) -> None:
        """Flush what was written, which trims the write-ahead log; optimise when much has changed."""
        if self._num_changes >= self._optimise_after and self._has_room_to_optimise():
            await self.optimise()
            return
        async with self._writing:
            if self._num_unflushed:
                self.space.check()
                with backend_errors("Edge", "flush"):
                    self._opened().flush()
                self._num_unflushed = 0

    async def optimise(self) -> None:
        """
        Free deleted points and build HNSW in a child process; searches are unavailable meanwhile.

        It takes tens of seconds. The index is paused meanwhile, so that no write waits for it.
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
                    # When cancelled, too: the index must not stay closed.
                    self._shard = self._open_shard()
                    self._num_changes = 0
        finally:
            self._is_optimising = False

    async def _write(self, operations: Iterable[tuple[edge.UpdateOperation, int]]) -> None:
        """Apply operations, each with its number of changes; the event loop runs between them."""
        if self._is_optimising:
            raise IndexPausedError("the Edge index is being optimised")
        async with self._writing:
            for operation, num_changes in operations:
                self.space.check()
                with backend_errors("Edge", "update"):
                    self._opened().update(operation)
                self._num_changes += num_changes
                self._num_unflushed += num_changes
                await asyncio.sleep(0)

    def _opened(self) -> edge.EdgeShard:
        if self._waits_for_room:
            raise IndexPausedError("the Edge index is not open: there is too little disk space")
        if self._shard is None:
            raise IndexUnavailableError("the Edge index is not open; call open() first")
        return self._shard

    def _close_shard(self) -> None:
        shard, self._shard = self._shard, None
        if shard is not None:
            with backend_errors("Edge", "close"):
                shard.close()
        self._num_unflushed = 0
        self._waits_for_room = False

    def _has_room_to_optimise(self) -> bool:
        """Return whether the disk has room for new segments next to the old ones."""
        needed = self._files.num_bytes()
        has_room = self.space.has_room_for(needed)
        if not has_room and not self._is_optimising_put_off:
            log.warning(
                "the index is not optimised: that needs %s of free disk besides the index. Free some space",
                megabytes(needed),
            )
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
    except OSError:  # no folder is writable: opening the index will raise an error
        return Path(os.sep)


def _point(entry: Entry) -> edge.Point:
    vectors: dict[str, Any] = {"sparse": _sparse(entry.fingerprints)}
    if entry.embedding is not None:
        vectors["dense"] = entry.embedding.tolist()
    return edge.Point(entry.prompt_id, vectors, {"namespace": entry.namespace})


def _sparse(fingerprints: Vector) -> edge.SparseVector:
    return edge.SparseVector(fingerprints.tolist(), [1.0] * len(fingerprints))


def _is_in(namespace: str) -> edge.FieldCondition:
    return edge.FieldCondition("namespace", match=edge.MatchValue(namespace))
