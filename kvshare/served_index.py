"""Opens and maintains the index of config.yaml. A failing index never prevents the server from starting."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvshare.errors import ConfigError
from kvshare.extras import how_to_install, missing_modules
from kvshare.part_problems import PartProblem
from kvshare.parts import PartReading, ServedPart
from kvshare.settings import IndexSettings, StoreSettings
from kvshare.status import IndexStatus
from kvshare.tiers import KV_FOLDER, VLLM_KV_FOLDER
from vector_index import (
    DiskSpace,
    EmbedderError,
    IndexPausedError,
    IndexSchema,
    Nominator,
    NominatorSettings,
    VectorIndex,
    VectorIndexError,
)

if TYPE_CHECKING:
    from vector_index import Embedder

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 5.0  # how often to check whether a pause is over
_MAINTAIN_EVERY = 6  # checks
_BY_EMBEDDING = (ServedPart.EMBEDDING, ServedPart.EMBEDDER, ServedPart.INDEX_EMBEDDER)
_FAILING = {
    ServedPart.FINGERPRINT: PartProblem.FINGERPRINT_FAILING,
    ServedPart.EMBEDDING: PartProblem.EMBEDDING_FAILING,
    ServedPart.EMBEDDER: PartProblem.EMBEDDER_FAILING,
    ServedPart.INDEXING: PartProblem.INDEXING_FAILING,
    ServedPart.INDEX_EMBEDDER: PartProblem.INDEX_EMBEDDER_FAILING,
}
_BLOCK_BYTES = 512  # unit of st_blocks, independent of the file system


class ServedIndex:
    """
    An index backend with its nominator.

    If it cannot be opened, requests are served with fewer hits, and opening is tried every half minute. If it
    is paused because the disk is nearly full, it continues within seconds of space being free, and catches
    up.
    If its files were deleted, it is made again and filled from the tree.
    `embedder`: set by `open`; None without search by embedding.
    `refill`: indexes what the tree has; the runtime, which has the tree, sets it.
    """

    def __init__(self, settings: IndexSettings, store: StoreSettings) -> None:
        self._settings = settings
        self._store = store
        self._space: DiskSpace | None = None
        self._store_bytes: int | None = None
        self._opened = False
        self._problem: str | None = None  # why the index could not be opened, as logged
        self._is_maintained = True
        self._is_refilling = False
        self.refill: Callable[[], Awaitable[None]] = _nothing

    async def open(self, forgotten: Iterable[tuple[str, int]]) -> Nominator:
        """
        Load the embedder, open the backend, and remove the prompts `forgotten` from it.

        Raises:  ConfigError for settings that cannot work
        """
        self.embedder, self._without = await asyncio.to_thread(_load_embedder, self._settings)
        settings = nominator_settings(self._settings)
        self._index = self._backend(settings.schema(self.embedder))
        self.nominator = Nominator(self._index, embedder=self.embedder, settings=settings)
        self._forgotten = list(forgotten)
        await self._try_open()
        await self._measure_store()
        self._maintenance = asyncio.create_task(self._maintain())
        return self.nominator

    async def close(self) -> None:
        """Called after `open`, also if the index could not be opened."""
        self._maintenance.cancel()
        await asyncio.gather(self._maintenance, return_exceptions=True)
        self.nominator.close()
        try:
            await self._index.close()
        except VectorIndexError as exc:
            log.warning(
                "the index was not closed cleanly: %s. Nothing to do: the next start opens it anyway", exc
            )

    def status(self) -> IndexStatus:
        """Return the status for `/ready` and the metrics. Reads the free space of the disk."""
        return IndexStatus(
            paused=self._index.why_paused(),
            num_waiting=self.nominator.num_waiting,
            free_bytes=None if self._space is None else self._space.free_bytes(),
            store_bytes=self._store_bytes,
            num_foreign_hits=self._index.foreign_hits,
            circuits={part: circuit.state for part, circuit in self.nominator.circuits.items()},
        )

    def parts(self) -> Iterator[PartReading]:
        """Yield the states of the parts that nomination can do without."""
        paused = self._index.why_paused()
        if self._problem is not None:
            yield PartReading(ServedPart.INDEX, PartProblem.INDEX_CLOSED, self._problem)
        elif paused is not None:
            yield PartReading(ServedPart.INDEX, PartProblem.INDEX_PAUSED, paused)
        else:
            yield PartReading(ServedPart.INDEX, PartProblem.INDEX_LOST if self._is_refilling else None)
        for name, circuit in self.nominator.circuits.items():
            part, problem = ServedPart(name), circuit.problem
            if part in _BY_EMBEDDING and self.embedder is None:
                continue
            yield PartReading(part, None if problem is None else _FAILING[part], problem or "")
        if self._without is not None:
            yield PartReading(ServedPart.EMBEDDER, PartProblem.EMBEDDER_MISSING, self._without)

    async def _try_open(self) -> None:
        try:
            if self._settings.backend == "server":
                # Other servers write there too: only prompts that this server has evicted are removed.
                await self._index.open()
                by_namespace: dict[str, list[int]] = {}  # of which there may be as many as prompts
                for namespace, prompt_id in self._forgotten:
                    by_namespace.setdefault(namespace, []).append(prompt_id)
                for namespace, ids in by_namespace.items():
                    await self._index.delete(namespace, ids)
            else:
                # Deleted unread: its KV is lost, or claimed from vLLM and indexed again, without embeddings.
                await self._index.recreate()
            self._opened = True
        except IndexPausedError:
            self._opened = True  # the index logged the pause, and opens by itself
        except VectorIndexError as exc:
            self._note_closed(exc)
            return
        if self._problem is not None:
            log.warning("the index is open: prompts are found by it again")
            self._problem = None
            await self._refill()

    def _note_closed(self, exc: VectorIndexError) -> None:
        """Log why the index cannot be opened: each reason once, as it is tried again and again."""
        if str(exc) != self._problem:
            self._problem = str(exc)
            log.warning(
                "the index cannot be opened: %s. Prompts are found by equal prefixes only; it is tried again",
                exc,
            )

    async def _maintain(self) -> None:
        for look in itertools.count(1):
            await asyncio.sleep(_LOOK_EVERY_S)
            if self._opened and self._index.has_lost_files():
                await self._make_again()
            if self._opened:
                await self._catch_up()
            if look % _MAINTAIN_EVERY == 0:
                await (self._keep_in_shape() if self._opened else self._try_open())
                await self._measure_store()

    async def _measure_store(self) -> None:
        if self._store.path is not None:
            self._store_bytes = await asyncio.to_thread(_bytes_below, Path(self._store.path))

    async def _make_again(self) -> None:
        """The files were deleted: what is in them now is found until the server stops, and no longer."""
        log.warning("the files of the index are gone: it is made again, and filled from what is stored")
        self._opened = False
        await self._try_open()
        if self._opened and self._problem is None:
            await self._refill()
            log.warning("the index is whole again")

    async def _refill(self) -> None:
        self._is_refilling = True
        try:
            await self.refill()
        finally:
            self._is_refilling = False

    async def _catch_up(self) -> None:
        try:
            await self.nominator.catch_up()
        except VectorIndexError as exc:
            self._note_closed(exc)
            self._opened = False

    async def _keep_in_shape(self) -> None:
        try:
            await self._index.maintain()
        except IndexPausedError:
            return  # the index logged the pause
        except (VectorIndexError, OSError) as exc:
            if self._is_maintained:
                log.warning(
                    "the index could not be optimised: %s. This is tried again; if it lasts, look at the "
                    "disk, or restart the server",
                    exc,
                )
            self._is_maintained = False
            return
        if not self._is_maintained:
            log.warning("the index can be optimised again")
            self._is_maintained = True

    def _backend(self, schema: IndexSchema) -> VectorIndex:
        if self._settings.backend == "edge":
            from vector_index import QdrantEdgeIndex

            folder = None if self._store.path is None else _writable(Path(self._store.path) / "index")
            index = QdrantEdgeIndex(schema, folder, min_free_bytes=self._store.min_free_bytes)
            self._space = index.space
            return index
        from vector_index import QdrantRemoteIndex

        url, key = self._settings.url, os.environ.get("KVSHARE_QDRANT_API_KEY")
        if self._settings.backend == "memory":
            url, key = ":memory:", None
        elif url is None:
            problem = "expected a Qdrant server's address for backend 'server', got null"
            raise ConfigError("index.url", problem)
        return QdrantRemoteIndex(schema, url, api_key=key, collection=self._settings.collection)


def _bytes_below(folder: Path) -> int:
    """Return the bytes on disk of a folder's files, which may be sparse, or deleted meanwhile; without KV."""
    num_blocks = 0
    for parent, folders, names in os.walk(folder):
        # Their tiers count them, and there may be very many files.
        folders[:] = [each for each in folders if each not in {KV_FOLDER, VLLM_KV_FOLDER}]
        for name in names:
            with suppress(OSError):
                num_blocks += os.lstat(os.path.join(parent, name)).st_blocks
    return num_blocks * _BLOCK_BYTES


def _writable(folder: Path) -> Path | None:
    """Return the folder, created if missing; None, for a temporary one, if it cannot be written."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            return folder  # the index waits until space is free
        log.warning("%s cannot be written (%s): the index is in a temporary folder", folder, exc.strerror)
        return None


async def _nothing() -> None:
    """There is no tree."""


def _load_embedder(settings: IndexSettings) -> tuple[Embedder | None, str | None]:
    """Return the loaded embedder; None if search by embedding is off, or for the reason that is returned."""
    if not settings.dense:
        return None, None
    missing = missing_modules("embeddings")
    if missing:
        log.warning(
            "no semantic search for donors: index.dense is on, and %s is not installed. Install it with "
            "%s, or set index.dense: false",
            ", ".join(missing),
            how_to_install("embeddings"),
        )
        return None, f"{', '.join(missing)} is not installed"
    from vector_index import Embedder

    embedder = Embedder(settings.embedder)
    try:
        embedder.load()
    except EmbedderError as exc:
        log.warning("search by embedding is off: %s. Correct index.embedder, or set index.dense: false", exc)
        return None, str(exc)
    return embedder, None


def nominator_settings(settings: IndexSettings) -> NominatorSettings:
    """Return the settings of nomination from config.yaml; others have their defaults."""
    names = {field.name for field in fields(NominatorSettings)}
    return NominatorSettings(**settings.model_dump(include=names))
