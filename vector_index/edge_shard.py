"""
The files of a Qdrant Edge shard: where they are, and how they are opened, created, optimised and removed.

    folder/shard/        Edge's own files: segments and write-ahead log

`EdgeShard.optimize()` of qdrant-edge-py 0.9 holds the GIL until it is done, about 0.4 ms per point. In the
server's process it would stop all requests for seconds, so it runs in a child process.
"""

import asyncio
import fcntl
import logging
import os
import shutil
import sys
import tempfile
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
_NUM_SEGMENTS = 6  # Edge merges segments above this number; merging rebuilds them


class ShardFiles:
    """A shard in a folder, or in a temporary folder that is created when it is first needed."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._temporary: Path | None = None
        self._opened: tuple[int, int] | None = None  # the folder's file system and number
        self._is_own = False  # what is there was created by this process

    @property
    def shard(self) -> Path:
        """Return the folder with Edge's own files; it may not exist yet."""
        if self._folder is not None:
            return self._folder / "shard"
        if self._temporary is None:
            with backend_errors("Edge", "make a temporary folder"):
                self._temporary = Path(tempfile.mkdtemp(prefix="kvshare-index-"))
        return self._temporary / "shard"

    @property
    def has_own(self) -> bool:
        """Return whether there is a shard that this process has created."""
        return self._is_own and self.shard.exists()

    def open(self, schema: IndexSchema) -> edge.EdgeShard:
        """Return the own shard, or a new one in place of another process's. Raises IndexUnavailableError."""
        if not self.has_own:
            self.remove()
            shard = self._create(schema)
        else:
            with backend_errors("Edge", "open", hint="; recreate() starts an empty one"):
                shard = edge.EdgeShard.load(str(self.shard), _config(schema))
        self._opened = self._found()
        return shard

    def are_lost(self) -> bool:
        """Return whether the opened shard's folder was deleted or replaced. What is written to it is lost."""
        return self._found() != self._opened

    def _found(self) -> tuple[int, int] | None:
        try:
            status = (self.shard / "wal").stat()
        except OSError:
            return None
        return status.st_dev, status.st_ino

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
        self._is_own = False

    def remove_temporary(self) -> None:
        """Remove the temporary folder, if there is one."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def num_bytes(self) -> int:
        """Return the bytes that the files take on disk; they are sparse."""
        files = (path for path in self.shard.rglob("*") if path.is_file())
        return sum(512 * path.stat().st_blocks for path in files)

    def _create(self, schema: IndexSchema) -> edge.EdgeShard:
        with backend_errors("Edge", "create"):
            self.shard.mkdir(parents=True, exist_ok=True, mode=0o700)
            shard = edge.EdgeShard.create(str(self.shard), _config(schema))
            namespace_index = edge.KeywordIndexParams(is_tenant=True)
            shard.update(edge.UpdateOperation.create_field_index("namespace", namespace_index))
        self._is_own = True
        return shard


def _config(schema: IndexSchema) -> edge.EdgeConfig:
    # A graph search reads hundreds of scattered vectors; quantised to bytes they fit into memory. The vectors
    # themselves are read for the nearest few only, and payloads with them: both stay on disk.
    in_bytes = edge.ScalarQuantizationConfig(edge.ScalarType.Int8, memory=edge.Memory.Pinned)
    dense = edge.EdgeVectorParams(
        max(1, schema.dimension),  # Edge wants one, also where no embedding is ever stored
        edge.Distance.Cosine,
        quantization_config=in_bytes,
        memory=edge.Memory.Cold,
    )
    return edge.EdgeConfig(
        vectors={"dense": dense},
        payload_memory=edge.Memory.Cold,
        max_search_threads=1,  # most searches read few segments; a thread pool would only add latency
        # Without a limit every optimisation would build one segment of the whole index, and need time and
        # memory for that (more than 14 GB at a million prompts).
        optimizers=edge.EdgeOptimizersConfig(
            max_segment_size=_MAX_SEGMENT_PROMPTS * 4 * max(1, schema.dimension) // 1024,  # in KB
            default_segment_number=_NUM_SEGMENTS,
        ),
    )


def _is_in_use(folder: Path) -> bool:
    """Return whether a process has the shard open. Tests Edge's lock, because opening it would write."""
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
