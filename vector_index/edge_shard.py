"""
The files of a Qdrant Edge shard: where they are, opened, created, optimised and thrown away.

    folder/schema.json   what the index was built with
    folder/shard/        Edge's own files: segments and write-ahead log

`EdgeShard.optimize()` of qdrant-edge-py 0.9 holds the GIL until it is done, about 0.4 ms a point: in the
server's process it would stop every request for seconds. So it runs in a process of its own.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import qdrant_edge as edge

from vector_index.errors import IndexUnavailableError
from vector_index.schema import IndexSchema, read_stamp, write_stamp

log = logging.getLogger(__name__)

OPTIMISE = """
import sys, qdrant_edge
shard = qdrant_edge.EdgeShard.load(sys.argv[1])
shard.optimize()
shard.close()
"""
_MAX_SEGMENT_PROMPTS = 260_000
_BYTES_OF_FINGERPRINTS = 600  # of a prompt of 500 tokens
_NUM_SEGMENTS = 6  # fewer are not merged further: what is merged is built again


class ShardFiles:
    """A shard in a folder, or in a temporary folder, made when it is first needed."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._temporary: Path | None = None

    @property
    def shard(self) -> Path:
        """The folder with Edge's own files, which may not be there yet."""
        if self._folder is not None:
            return self._folder / "shard"
        if self._temporary is None:
            with edge_errors("make a temporary folder"):
                self._temporary = Path(tempfile.mkdtemp(prefix="kvshare-index-"))
        return self._temporary / "shard"

    def open(self, schema: IndexSchema) -> edge.EdgeShard:
        """
        The stored shard, or a new one where there is none.

        Raises:  IndexSchemaError, IndexUnavailableError
        """
        if not self.shard.exists():
            return self._create(schema)
        schema.check(read_stamp(self.shard.with_name("schema.json")))
        with edge_errors("open", hint="; recreate() starts an empty one"):
            return edge.EdgeShard.load(str(self.shard), _config(schema))

    async def optimise(self) -> None:
        """
        Optimise the shard, which nobody has open, and wait for it.

        A child that fails is logged: the shard is then as it was. Cancelling ends the child.
        """
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", OPTIMISE, str(self.shard), stderr=asyncio.subprocess.DEVNULL
        )
        try:
            if await child.wait() != 0:
                log.warning("optimising the Edge index failed with exit status %d", child.returncode)
        finally:
            if child.returncode is None:
                child.kill()
                await asyncio.shield(child.wait())

    def remove(self) -> None:
        """Throw the shard away, readable or not. Raises IndexUnavailableError if somebody has it open."""
        if self.shard.exists() and _is_in_use(self.shard):
            raise IndexUnavailableError("another process has the Edge index open")
        shutil.rmtree(self.shard, ignore_errors=True)

    def remove_temporary(self) -> None:
        """Remove the temporary folder, if there is one."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def num_bytes(self) -> int:
        """What the files take of the disk: they are sparse."""
        files = (path for path in self.shard.rglob("*") if path.is_file())
        return sum(512 * path.stat().st_blocks for path in files)

    def _create(self, schema: IndexSchema) -> edge.EdgeShard:
        with edge_errors("create"):
            self.shard.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            # The stamp goes first: a stamp without a shard is an empty index, not a riddle.
            write_stamp(self.shard.with_name("schema.json"), schema)
            shard = edge.EdgeShard.create(str(self.shard), _config(schema))
            namespace_index = edge.KeywordIndexParams(is_tenant=True)
            shard.update(edge.UpdateOperation.create_field_index("namespace", namespace_index))
        return shard


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
def edge_errors(what: str, *, hint: str = "") -> Iterator[None]:
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
