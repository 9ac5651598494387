"""
The files of a Qdrant Edge shard: where they are, and how they are opened, created, optimised and removed.

    folder/schema.json   what the index was built with
    folder/shard/        Edge's own files: segments and write-ahead log

`EdgeShard.optimize()` of qdrant-edge-py 0.9 holds the GIL until it is done, about 0.4 ms per point. In the
server's process it would stop all requests for seconds, so it runs in a child process.
"""

import asyncio
import fcntl
import json
import logging
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import qdrant_edge as edge

from vector_index.base import IndexSchema
from vector_index.errors import IndexUnavailableError, backend_errors

log = logging.getLogger(__name__)

OPTIMISE = """
import sys, qdrant_edge
shard = qdrant_edge.EdgeShard.load(sys.argv[1])
shard.optimize()
shard.close()
"""
_MAX_SEGMENT_PROMPTS = 260_000
_BYTES_OF_FINGERPRINTS = 600  # for a prompt of 500 tokens
_NUM_SEGMENTS = 6  # Edge merges segments above this number; merging rebuilds them


class ShardFiles:
    """A shard in a folder, or in a temporary folder that is created when it is first needed."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._temporary: Path | None = None
        self._opened: tuple[int, int] | None = None  # the folder's file system and number

    @property
    def shard(self) -> Path:
        """The folder with Edge's own files; it may not exist yet."""
        if self._folder is not None:
            return self._folder / "shard"
        if self._temporary is None:
            with backend_errors("Edge", "make a temporary folder"):
                self._temporary = Path(tempfile.mkdtemp(prefix="kvshare-index-"))
        return self._temporary / "shard"

    def open(self, schema: IndexSchema) -> edge.EdgeShard:
        """The stored shard, or a new one. Raises IndexSchemaError, IndexUnavailableError."""
        shard = self._load(schema)
        self._opened = self._found()
        return shard

    def are_lost(self) -> bool:
        """Whether the folder of the opened shard was deleted or replaced. What is written to it is lost."""
        return self._found() != self._opened

    def _found(self) -> tuple[int, int] | None:
        try:
            found = (self.shard / "wal").stat()
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def _load(self, schema: IndexSchema) -> edge.EdgeShard:
        if not self.shard.exists():
            return self._create(schema)
        schema.check(self._stamp())
        with backend_errors("Edge", "open", hint="; recreate() starts an empty one"):
            return edge.EdgeShard.load(str(self.shard), _config(schema))

    async def optimise(self) -> None:
        """
        Optimise the shard in a child process and wait for it. No process may have the shard open.

        If the child fails, that is logged, and the shard is unchanged; where native code ended it, stderr has
        the place. Cancelling ends the child.
        """
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-X", "faulthandler", "-c", OPTIMISE, str(self.shard)
        )
        try:
            if await child.wait() != 0:
                log.warning(
                    "optimising the Edge index failed with exit status %d; the index is used as it was",
                    child.returncode,
                )
        finally:
            if child.returncode is None:
                child.kill()
                await asyncio.shield(child.wait())

    def remove(self) -> None:
        """Delete the shard, readable or not. Raises IndexUnavailableError if a process has it open."""
        if self.shard.exists() and _is_in_use(self.shard):
            raise IndexUnavailableError(
                "another process has the Edge index open; stop it, or set another folder"
            )
        shutil.rmtree(self.shard, ignore_errors=True)

    def remove_temporary(self) -> None:
        """Remove the temporary folder, if there is one."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def num_bytes(self) -> int:
        """Bytes that the files take on disk; they are sparse."""
        files = (path for path in self.shard.rglob("*") if path.is_file())
        return sum(512 * path.stat().st_blocks for path in files)

    def _stamp(self) -> object:
        """The stamp of the stored shard; None if it is missing or not JSON."""
        try:
            return json.loads(self.shard.with_name("schema.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None

    def _create(self, schema: IndexSchema) -> edge.EdgeShard:
        with backend_errors("Edge", "create"):
            self.shard.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The stamp is written first: after a kill a stamp without a shard is read as an empty index.
            half_written = self.shard.with_name("schema.tmp")
            half_written.write_text(json.dumps(asdict(schema)), encoding="utf-8")
            half_written.replace(self.shard.with_name("schema.json"))
            shard = edge.EdgeShard.create(str(self.shard), _config(schema))
            namespace_index = edge.KeywordIndexParams(is_tenant=True)
            shard.update(edge.UpdateOperation.create_field_index("namespace", namespace_index))
        return shard


def _config(schema: IndexSchema) -> edge.EdgeConfig:
    # A graph search reads hundreds of scattered vectors; quantised to bytes they fit into memory.
    in_bytes = edge.ScalarQuantizationConfig(edge.ScalarType.Int8, memory=edge.Memory.Pinned)
    dense = {
        "dense": edge.EdgeVectorParams(schema.dimension, edge.Distance.Cosine, quantization_config=in_bytes)
    }
    # By default a filtered search over fewer than 20,000 points scans all of them once a point was deleted
    # (2.5 ms at 5,000 points); the posting lists are always faster here (0.1 ms).
    # Pinned in memory (8 KB per prompt, 3 KB if only cached), because a search must not wait for the disk.
    sparse = {"sparse": edge.EdgeSparseVectorParams(full_scan_threshold=1, memory=edge.Memory.Pinned)}
    segment_bytes = _MAX_SEGMENT_PROMPTS * max(4 * schema.dimension, _BYTES_OF_FINGERPRINTS)
    return edge.EdgeConfig(
        vectors=dense if schema.dimension else None,
        sparse_vectors=sparse,
        max_search_threads=1,  # most searches read few segments; a thread pool would only add latency
        # Without a limit every optimisation would build one segment of the whole index, and need time and
        # memory for that (more than 14 GB at a million prompts).
        optimizers=edge.EdgeOptimizersConfig(
            max_segment_size=segment_bytes // 1024,  # in KB, of the larger kind of vector alone
            default_segment_number=_NUM_SEGMENTS,
        ),
    )


def _is_in_use(folder: Path) -> bool:
    """Whether a process has the shard open. Tests Edge's own lock, because opening the shard would write."""
    try:
        log_folder = os.open(folder / "wal", os.O_RDONLY)
    except OSError:
        return False  # a damaged shard cannot be open
    try:
        fcntl.flock(log_folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(log_folder)
    return False
