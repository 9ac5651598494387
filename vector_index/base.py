"""
What every index backend does: it stores prompts' fingerprints and embeddings, and finds the nearest ones.

The namespace is part of every call and of every query's filter. It is checked again in every hit: a hit of
another namespace is dropped, counted and logged as an error. This file knows no backend.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vector_index.errors import IndexSchemaError

log = logging.getLogger(__name__)

Vector = NDArray[np.uint32] | NDArray[np.float32]
VectorName = Literal["sparse", "dense"]  # fingerprints, embedding


@dataclass(frozen=True, slots=True)
class IndexSchema:
    """
    The settings that an index was built with, written next to it as a stamp. `dimension` 0: no embeddings.

    With other fingerprints or another embedder the stored vectors are useless: an index with another stamp is
    rebuilt, not read.
    """

    kgram: int
    window: int
    max_fingerprints: int
    embedder: str = ""
    dimension: int = 0
    version: int = 1

    def check(self, stamp: object) -> None:
        """Compare with the stamp of an index. Raises IndexSchemaError that names the field that differs."""
        if not isinstance(stamp, dict):
            raise IndexSchemaError("the index has no schema stamp; rebuild it")
        for name, value in asdict(self).items():
            if stamp.get(name) != value:
                raise IndexSchemaError(f"the index has {name} {stamp.get(name)!r}, expected {value!r}")


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """
    One prompt in the index. `prompt_id` is unique over all namespaces and not negative.

    Shapes:  fingerprints (F,) uint32, unique; embedding (D,) float32 or None
    """

    prompt_id: int
    namespace: str
    fingerprints: NDArray[np.uint32]
    embedding: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """A nominated prompt. The search defines what `score` measures; higher is nearer."""

    prompt_id: int
    score: float


class VectorIndex(ABC):
    """
    A rebuildable index over prompts. Every method may raise IndexUnavailableError.

    Used from one event loop. `foreign_hits` counts dropped hits of other namespaces; it must stay 0.
    """

    is_own: bool = False  # whether all its fingerprints were added by this process

    def __init__(self, schema: IndexSchema) -> None:
        self.schema = schema
        self.foreign_hits = 0

    @abstractmethod
    async def open(self) -> None:
        """Open or create the index; IndexSchemaError if it was built with another schema."""

    @abstractmethod
    async def close(self) -> None:
        """Release the index; harmless when it is not open."""

    @abstractmethod
    async def recreate(self) -> None:
        """Delete what is stored, readable or not, and open an empty index."""

    @abstractmethod
    async def upsert(self, entries: Sequence[Entry]) -> None:
        """Store entries; an entry with a known prompt id replaces the whole stored one."""

    @abstractmethod
    async def delete(self, namespace: str, prompt_ids: Sequence[int]) -> None:
        """Delete prompts of a namespace; unknown ids and ids of other namespaces are ignored."""

    @abstractmethod
    async def _nearest(
        self, namespace: str, name: VectorName, vector: Vector, *, limit: int, min_score: float | None
    ) -> Iterable[tuple[object, Hit]]:
        """Return the stored vectors nearest to this one, each as (namespace as stored, hit), best first."""

    async def search_fingerprints(
        self, namespace: str, fingerprints: NDArray[np.uint32], limit: int
    ) -> list[Hit]:
        """Return the prompts that share the most of these fingerprints; the score is how many they share."""
        if not len(fingerprints):
            return []
        found = await self._nearest(namespace, "sparse", fingerprints, limit=limit, min_score=None)
        return self.own_hits(namespace, found)

    async def search_embedding(
        self, namespace: str, embedding: NDArray[np.float32], limit: int, max_distance: float
    ) -> list[Hit]:
        """Return the prompts within a cosine distance; the score is the cosine similarity, 1 - distance."""
        self.check_embedding(embedding)
        min_score = 1.0 - max_distance
        found = await self._nearest(namespace, "dense", embedding, limit=limit, min_score=min_score)
        return self.own_hits(namespace, found)

    @abstractmethod
    async def count(self, namespace: str | None = None) -> int:
        """Return how many prompts a namespace, or the whole index, holds."""

    async def maintain(self) -> None:
        """Do housekeeping, by default none. To be called now and then, off the critical path."""
        return

    def why_paused(self) -> str | None:
        """Check whether writes would raise IndexPausedError now, and return why; None if they would not."""
        return None

    def has_lost_files(self) -> bool:
        """Return whether what is stored was deleted by others, so that `recreate` is needed."""
        return False

    async def resume(self) -> None:
        """After a pause, do what it put off; otherwise nothing."""
        return

    def check_entries(self, entries: Iterable[Entry]) -> None:
        """
        Check that the index can hold these entries.

        Raises:  ValueError for a negative id or an embedding that is not finite,
                 IndexSchemaError for an embedding of another dimension
        """
        for entry in entries:
            if entry.prompt_id < 0:
                raise ValueError(f"prompt id {entry.prompt_id} is negative")
            if entry.embedding is not None:
                self.check_embedding(entry.embedding)

    def check_embedding(self, embedding: NDArray[np.float32]) -> None:
        """Check an embedding's shape, and that it is finite: Qdrant would accept NaN without an error."""
        if embedding.shape != (self.schema.dimension,):
            raise IndexSchemaError(
                f"embedding has shape {embedding.shape}, expected ({self.schema.dimension},)"
            )
        if not np.isfinite(embedding).all():
            raise ValueError("embedding is not finite")

    def own_hits(self, namespace: str, pairs: Iterable[tuple[object, Hit]]) -> list[Hit]:
        """Return the hits among (namespace as stored, hit) that belong to this namespace."""
        hits = []
        for owner, hit in pairs:
            if owner == namespace:
                hits.append(hit)
            else:
                self.foreign_hits += 1
                log.error(
                    "the index returned a hit of another namespace; it was dropped. "
                    "Rebuild the index, and report this as a bug"
                )
        return hits
