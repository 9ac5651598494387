"""
The index in this process, on disk, by Qdrant Edge. The only file that imports `qdrant_edge`.

    folder/schema.json   what the index was built with
    folder/shard/        Edge's own files: segments and write-ahead log

Two measured facts about qdrant-edge-py 0.9 shape this file:
- Every native call holds the GIL until it returns: a thread would add hops (0.08 ms on a search of
  0.22 ms) and free nothing, not even the event loop of a time limit, so all are called directly.
  Searches take 0.05-1 ms, writes go in slices with a turn for the event loop in between, a flush
  takes 10-300 ms by what was written since the last one.
- `optimize()` holds it too, about 0.4 ms a point: seconds in which nothing would be served. It
  runs in a child process instead, while searches here answer "unavailable". It is rarely due:
  it frees deleted points and builds HNSW; fingerprint search is as fast without it.

Its files are mapped and sparse. With no room left on ext4 and tmpfs, these end the process by
SIGBUS: upserts, deletions, creating, opening. Flushing raises; the optimiser's child dies. Searching and
closing write nothing and go well. So room is looked at before each of the former (`disk_space.py`).
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import qdrant_edge as edge
from numpy.typing import NDArray

from vector_index.base import Entry, Hit, VectorIndex
from vector_index.disk_space import MIN_FREE_BYTES, DiskSpace, megabytes
from vector_index.edge_child import optimise_in_child
from vector_index.errors import IndexPausedError, IndexUnavailableError
from vector_index.schema import IndexSchema, read_stamp, write_stamp

log = logging.getLogger(__name__)

_MAX_SEGMENT_PROMPTS = 260_000
_BYTES_OF_FINGERPRINTS = 600  # of a prompt of 500 tokens
_NUM_SEGMENTS = 6  # fewer are not merged further: what is merged is built again
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
        self._folder = folder
        self._temporary: Path | None = None
        self._optimise_after = optimise_after
        self._num_changes = 0
        self._num_unflushed = 0
        self._shard: edge.EdgeShard | None = None
        self._waits_for_room = False  # to be opened
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
            if self._temporary is not None:
                shutil.rmtree(self._temporary, ignore_errors=True)
                self._temporary = None

    def why_paused(self) -> str | None:
        reason = self.space.why_low()
        if reason is None and self._waits_for_room:
            return "it is about to be opened"
        return reason

    async def resume(self) -> None:
        """Open what could not be opened for want of room."""
        async with self._writing:
            if self._waits_for_room and self.space.why_low() is None:
                self._shard = self._open_shard()

    async def recreate(self) -> None:
        async with self._writing:
            self._close_shard()
            self._shard = self._recreate_shard()

    async def upsert(self, entries: Sequence[Entry]) -> None:
        self.check_entries(entries)
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
        with _edge_errors("count"):
            return self._opened().count(edge.CountRequest(exact=True, filter=only))

    async def maintain(self) -> None:
        """Flush what was written (trims the write-ahead log); optimise when much has changed."""
        if self._num_changes >= self._optimise_after and self._has_room_to_optimise():
            await self.optimise()
            return
        async with self._writing:
            if self._num_unflushed:
                self.space.check()
                with _edge_errors("flush"):
                    self._opened().flush()
                self._num_unflushed = 0

    async def optimise(self) -> None:
        """
        Free deleted points and build HNSW in a child process; searches are unavailable meanwhile.

        Raises:  IndexUnavailableError if the shard cannot be opened again afterwards
        """
        async with self._writing:
            self._opened()
            self.space.check()
            self._close_shard()
            try:
                await optimise_in_child(self._shard_folder())
            finally:
                # Also when cancelled: the index must not stay closed.
                self._shard = self._open_shard()
                self._num_changes = 0

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
        with _edge_errors("search"):
            found = self._opened().query(request)
        return self.own_hits(
            namespace,
            (((p.payload or {}).get("namespace"), Hit(int(p.id), p.score)) for p in found),
        )

    def _update(self, operation: edge.UpdateOperation, num_changes: int) -> None:
        self.space.check()
        with _edge_errors("update"):
            self._opened().update(operation)
        self._num_changes += num_changes
        self._num_unflushed += num_changes

    def _opened(self) -> edge.EdgeShard:
        if self._waits_for_room:
            raise IndexPausedError("the Edge index waits for room to be opened")
        if self._shard is None:
            raise IndexUnavailableError("the Edge index is not open")
        return self._shard

    def _shard_folder(self) -> Path:
        if self._folder is not None:
            return self._folder / "shard"
        if self._temporary is None:
            with _edge_errors("make a temporary folder"):
                self._temporary = Path(tempfile.mkdtemp(prefix="kvshare-index-"))
        return self._temporary / "shard"

    def _close_shard(self) -> None:
        shard, self._shard = self._shard, None
        if shard is not None:
            with _edge_errors("close"):
                shard.close()
        self._num_unflushed = 0
        self._waits_for_room = False

    def _check_room_to_open(self) -> None:
        self._waits_for_room = True
        self.space.check()
        self._waits_for_room = False

    def _has_room_to_optimise(self) -> bool:
        """Segments are built anew beside the old ones."""
        files = (path for path in self._shard_folder().rglob("*") if path.is_file())
        needed = sum(512 * path.stat().st_blocks for path in files)
        has_room = self.space.has_room_for(needed)
        if not has_room and not self._is_optimising_put_off:
            log.warning("the index is not optimised until %s of disk are free for it", megabytes(needed))
        self._is_optimising_put_off = not has_room
        return has_room

    def _open_shard(self) -> edge.EdgeShard:
        self._check_room_to_open()
        folder = self._shard_folder()
        if not folder.exists():
            return self._create_shard(folder)
        self.schema.check(read_stamp(folder.with_name("schema.json")))
        with _edge_errors("open", hint="; recreate() starts an empty one"):
            return edge.EdgeShard.load(str(folder), _config(self.schema))

    def _recreate_shard(self) -> edge.EdgeShard:
        folder = self._shard_folder()
        if folder.exists() and _is_in_use(folder):
            raise IndexUnavailableError("another process has the Edge index open")
        shutil.rmtree(folder, ignore_errors=True)  # also where there is no room: this may make some
        self._check_room_to_open()
        return self._create_shard(folder)

    def _create_shard(self, folder: Path) -> edge.EdgeShard:
        with _edge_errors("create"):
            folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The stamp goes first: a stamp without a shard is an empty index, not a riddle.
            write_stamp(folder.with_name("schema.json"), self.schema)
            shard = edge.EdgeShard.create(str(folder), _config(self.schema))
            namespace_index = edge.KeywordIndexParams(is_tenant=True)
            shard.update(edge.UpdateOperation.create_field_index("namespace", namespace_index))
        self._num_changes = 0
        return shard


def _temporary_root() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except OSError:  # no folder can be written: opening the index will say so
        return Path(os.sep)


def _config(schema: IndexSchema) -> edge.EdgeConfig:
    # A walk through a graph reads hundreds of vectors here and there: in bytes they fit into memory.
    in_bytes = edge.ScalarQuantizationConfig(edge.ScalarType.Int8, memory=edge.Memory.Pinned)
    dense = {
        "dense": edge.EdgeVectorParams(schema.dimension, edge.Distance.Cosine, quantization_config=in_bytes)
    }
    # By default a filtered search over fewer points than 20,000 scans them all once a point was
    # deleted (2.5 ms at 5,000 points); the postings are always quicker here (0.1 ms).
    # Pinned, because a search must not wait for the disk: 8 KB a prompt in memory, 3 KB if only cached.
    sparse = {"sparse": edge.EdgeSparseVectorParams(full_scan_threshold=1, memory=edge.Memory.Pinned)}
    segment_bytes = _MAX_SEGMENT_PROMPTS * max(4 * schema.dimension, _BYTES_OF_FINGERPRINTS)
    return edge.EdgeConfig(
        vectors=dense if schema.dimension else None,
        sparse_vectors=sparse,
        max_search_threads=1,  # most searches meet few segments: a pool only adds hand-overs
        # Without a limit every optimisation builds one segment of everything: time and memory of each grow
        # with the index (14 GB and more at a million prompts).
        optimizers=edge.EdgeOptimizersConfig(
            max_segment_size=segment_bytes // 1024,  # in KB, of the larger kind of vector alone
            default_segment_number=_NUM_SEGMENTS,
        ),
    )


def _point(entry: Entry) -> edge.Point:
    vectors: dict[str, Any] = {"sparse": _sparse(entry.fingerprints)}
    if entry.embedding is not None:
        vectors["dense"] = entry.embedding.tolist()
    return edge.Point(entry.prompt_id, vectors, {"namespace": entry.namespace})


def _sparse(fingerprints: NDArray[np.uint32]) -> edge.SparseVector:
    return edge.SparseVector(fingerprints.tolist(), [1.0] * len(fingerprints))


def _is_in(namespace: str) -> edge.FieldCondition:
    return edge.FieldCondition("namespace", match=edge.MatchValue(namespace))


def _is_in_use(folder: Path) -> bool:
    """Whether somebody has the shard open. Asked of Edge's own lock: opening the shard would write."""
    try:
        log_folder = os.open(folder / "wal", os.O_RDONLY)
    except OSError:
        return False  # damaged, which is in nobody's use
    try:
        fcntl.flock(log_folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(log_folder)
    return False


@contextlib.contextmanager
def _edge_errors(what: str, *, hint: str = "") -> Iterator[None]:
    """Translate what Edge raises: a bare Exception, or a Rust panic, which is a BaseException."""
    try:
        yield
    except IndexUnavailableError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        why = error.strerror if isinstance(error, OSError) and error.strerror else type(error).__name__
        message = f"Edge could not {what}: {why}{hint}"
        raise IndexUnavailableError(message) from error
