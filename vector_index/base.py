"""
What every index backend does: store prompts' fingerprints and embeddings, find the near ones.

The namespace is a required part of every call and of every query's filter, and it is read again
from every hit that comes back: a hit of another namespace is dropped, counted and logged as an
error, whatever the backend. This file knows no backend.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vector_index.errors import IndexSchemaError
from vector_index.schema import IndexSchema

log = logging.getLogger(__name__)


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
    """A nominated prompt; what `score` is says the search that found it, higher is nearer."""

    prompt_id: int
    score: float


class VectorIndex(ABC):
    """
    A rebuildable index over prompts. Every method may raise IndexUnavailableError.

    Used from one event loop. `foreign_hits` counts hits that another namespace owned: it must stay 0.
    """

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
        """Throw away whatever is stored, readable or not, and open an empty index."""

    @abstractmethod
    async def upsert(self, entries: Sequence[Entry]) -> None:
        """Store entries; one with a known prompt id replaces the stored one as a whole."""

    @abstractmethod
    async def delete(self, namespace: str, prompt_ids: Sequence[int]) -> None:
        """Forget prompts of a namespace; unknown ids and those of others are left alone."""

    @abstractmethod
    async def search_fingerprints(
        self, namespace: str, fingerprints: NDArray[np.uint32], limit: int
    ) -> list[Hit]:
        """Prompts that share the most of these fingerprints; the score is how many they share."""

    @abstractmethod
    async def search_embedding(
        self,
        namespace: str,
        embedding: NDArray[np.float32],
        limit: int,
        max_distance: float,
    ) -> list[Hit]:
        """Prompts within a cosine distance; the score is the cosine similarity, 1 - distance."""

    @abstractmethod
    async def count(self, namespace: str | None = None) -> int:
        """How many prompts a namespace, or the whole index, holds."""

    async def maintain(self) -> None:
        """Housekeeping, to be called from time to time off the critical path. Some have nothing to do."""
        return

    def why_paused(self) -> str | None:
        """Why nothing may be written for now (IndexPausedError), looked at anew; None where it may."""
        return None

    async def resume(self) -> None:
        """Do what a pause that is over has put off. Without one, nothing."""
        return

    def check_entries(self, entries: Iterable[Entry]) -> None:
        """
        Refuse entries that the index cannot hold.

        Raises:  ValueError for a negative id or an embedding that is not finite,
                 IndexSchemaError for an embedding of another dimension
        """
        for entry in entries:
            if entry.prompt_id < 0:
                raise ValueError(f"prompt id {entry.prompt_id} is negative")
            if entry.embedding is not None:
                self.check_embedding(entry.embedding)

    def check_embedding(self, embedding: NDArray[np.float32]) -> None:
        """Refuse an embedding of another shape, or with NaN, which Qdrant would take silently."""
        if embedding.shape != (self.schema.dimension,):
            raise IndexSchemaError(
                f"embedding has shape {embedding.shape}, wanted ({self.schema.dimension},)"
            )
        if not np.isfinite(embedding).all():
            raise ValueError("embedding is not finite")

    def own_hits(self, namespace: str, found: Iterable[tuple[object, Hit]]) -> list[Hit]:
        """The hits among (namespace as stored, hit) that belong to this namespace."""
        hits = []
        for owner, hit in found:
            if owner == namespace:
                hits.append(hit)
            else:
                self.foreign_hits += 1
                log.error("the index returned a hit of another namespace; dropped")
        return hits
