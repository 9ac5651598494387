"""
The index in this process: fingerprints in memory (`postings.py`), embeddings on disk by Qdrant Edge. Only
this file and `edge_shard.py` import that. What is stored ends with the process: each start fills it again.

Two measured facts about qdrant-edge-py 0.9 shape this file:
- Every native call holds the GIL until it returns. A thread would cost 0.08 ms on a search of 0.22 ms and
  would not free the event loop, so all calls are made directly. Searches take 0.05-1 ms. Writes are cut into
  slices, and the event loop runs between them. A flush takes 10-300 ms, depending on what was written.
- Optimising takes seconds. It runs in a child process (`edge_shard.py`); meanwhile searches by embedding
  raise IndexUnavailableError. It is rarely needed: it frees deleted points and builds HNSW.

The files are sparse and mapped into memory. On a full ext4 or tmpfs, upserting, deleting, creating and
opening end the process by SIGBUS; flushing raises, and the optimising child dies. So free space is checked
before each of these (`disk_space.py`). Searching and closing write nothing and always work.
"""

import asyncio
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import qdrant_edge as edge

from vector_index.base import Entry, Hit, IndexSchema, Vector, VectorIndex, VectorName
from vector_index.disk_space import MIN_FREE_BYTES, DiskSpace, megabytes
from vector_index.edge_shard import ShardFiles
from vector_index.errors import IndexPausedError, IndexUnavailableError, backend_errors
from vector_index.postings import Postings

log = logging.getLogger(__name__)

_EF = 64  # HNSW's search width in each segment; 100 finds no more
_OVERSAMPLING = 4.0  # times `limit`: the nearest quantised vectors, which are scored again in float32
_SLICE = 16  # prompts per write
_DELETED = 256  # points per native deletion


class QdrantEdgeIndex(VectorIndex):
    """
    Postings, and a Qdrant Edge shard in a folder, or in a temporary folder that `close` removes. The shard
    has the prompts with an embedding. What another process has left in the folder is deleted by `open`.

    `maintain` optimises after `optimise_after` writes and deletions. With less than `min_free_bytes` of disk
    free, every write raises IndexPausedError, and searches still work. An index that could not be opened for
    that reason finds nothing until `resume` opens it.
    """

    is_own = True  # they are in this process's memory

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
        self._postings = Postings()
        self._embedded: set[int] = set()  # prompts in the shard
        self._is_open = False
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
            self._is_open = False
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
        async with self._changing():
            for start in range(0, len(entries), _SLICE):
                some = entries[start : start + _SLICE]
                embedded = {entry.prompt_id: entry for entry in some if entry.embedding is not None}
                others = self._embedded.intersection(entry.prompt_id for entry in some).difference(embedded)
                self._delete_points(others)
                self._upsert_points(embedded.values())
                self._postings.add(some)
                await asyncio.sleep(0)

    async def delete(self, namespace: str, prompt_ids: Sequence[int]) -> None:
        async with self._changing():
            for start in range(0, len(prompt_ids), _DELETED):
                owned = self._postings.owned(namespace, prompt_ids[start : start + _DELETED])
                self._delete_points(self._embedded.intersection(owned))
                self._postings.forget(owned)
                await asyncio.sleep(0)

    async def _nearest(
        self, namespace: str, name: VectorName, vector: Vector, *, limit: int, min_score: float | None
    ) -> Iterable[tuple[object, Hit]]:
        if self._waits_for_room:
            return ()
        if name == "sparse":
            self._check_open()
            return self._postings.search(namespace, vector.astype(np.uint32, copy=False), limit)
        rescored = edge.QuantizationSearchParams(rescore=True, oversampling=_OVERSAMPLING)
        request = edge.QueryRequest(
            limit=limit,
            query=edge.Query.Nearest(vector.tolist(), using=name),
            filter=edge.Filter(must=[_is_in(namespace)]),
            with_payload=True,
            score_threshold=min_score,
            params=edge.SearchParams(hnsw_ef=_EF, quantization=rescored),
        )
        with backend_errors("Edge", "search"):
            found = self._opened().query(request)
        return (((p.payload or {}).get("namespace"), Hit(int(p.id), p.score)) for p in found)

    async def count(self, namespace: str | None = None) -> int:
        self._check_open()
        return self._postings.count(namespace)

    async def maintain(self) -> None:
        """Flush what was written, which trims the write-ahead log; optimise when much has changed."""
        if self._postings.is_worth_compacting:
            await self._compact()
        if self._num_changes >= self._optimise_after and self._has_room_to_optimise():
            await self.optimise()
            return
        async with self._writing:
            if self._num_unflushed:
                self.space.check()
                with backend_errors("Edge", "flush"):
                    self._opened().flush()
                self._num_unflushed = 0

    async def _compact(self) -> None:
        """Free the memory of forgotten prompts in a thread. The index is paused; searches go on."""
        self._is_optimising = True
        try:
            async with self._writing:
                self._postings = await asyncio.to_thread(self._postings.compacted)
        finally:
            self._is_optimising = False

    async def optimise(self) -> None:
        """
        Free deleted points and build HNSW in a child process; embeddings are not searched meanwhile.

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

    @asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """Raises IndexPausedError, IndexUnavailableError if nothing can be changed."""
        if self._is_optimising:
            raise IndexPausedError("the Edge index is being optimised")
        async with self._writing:
            self.space.check()
            self._opened()
            yield

    def _upsert_points(self, entries: Collection[Entry]) -> None:
        if entries:
            self._apply(edge.UpdateOperation.upsert_points(list(map(_point, entries))), len(entries))
            self._embedded.update(entry.prompt_id for entry in entries)

    def _delete_points(self, prompt_ids: Collection[int]) -> None:
        if prompt_ids:
            self._apply(edge.UpdateOperation.delete_points(list(prompt_ids)), len(prompt_ids))
            self._embedded.difference_update(prompt_ids)

    def _apply(self, operation: edge.UpdateOperation, num_changes: int) -> None:
        self.space.check()
        with backend_errors("Edge", "update"):
            self._opened().update(operation)
        self._num_changes += num_changes
        self._num_unflushed += num_changes

    def _check_open(self) -> None:
        """Fingerprints are found while the shard is optimised, or could not be opened after that."""
        if self._waits_for_room:
            raise IndexPausedError("the Edge index is not open: there is too little disk space")
        if not self._is_open:
            raise IndexUnavailableError("the Edge index is not open; call open() first")

    def _opened(self) -> edge.EdgeShard:
        self._check_open()
        if self._shard is None:
            raise IndexUnavailableError("the Edge index is being optimised, or could not be opened again")
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
        if not self._files.has_own:
            self._postings, self._embedded = Postings(), set()
        shard = self._files.open(self.schema)
        self._is_open = True
        return shard


def _temporary_root() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # no folder is writable: opening the index will raise an error
        return Path(os.sep)


def _point(entry: Entry) -> edge.Point:
    assert entry.embedding is not None, "only those are in the shard"
    return edge.Point(entry.prompt_id, {"dense": entry.embedding.tolist()}, {"namespace": entry.namespace})


def _is_in(namespace: str) -> edge.FieldCondition:
    return edge.FieldCondition("namespace", match=edge.MatchValue(namespace))
