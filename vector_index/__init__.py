"""
Which earlier prompts may share KV with a new one: found by token prefix, fingerprints and embedding.

`Nominator` is the class to start from. The backends and the embedder load heavy libraries, so they are
imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from vector_index.base import Entry, Hit, VectorIndex
from vector_index.circuit import CircuitState, Failure, FailureReason
from vector_index.disk_space import DiskSpace, megabytes
from vector_index.errors import (
    EmbedderError,
    IndexPausedError,
    IndexSchemaError,
    IndexUnavailableError,
    VectorIndexError,
)
from vector_index.nomination import Candidate, Nomination, NominatorSettings, PromptRecord
from vector_index.nominator import Nominator
from vector_index.prompt_text import PromptText, TextEmbedder, embed_prompts, windows
from vector_index.schema import IndexSchema

if TYPE_CHECKING:
    from vector_index.embedder import Embedder
    from vector_index.qdrant_edge import QdrantEdgeIndex
    from vector_index.qdrant_remote import QdrantRemoteIndex

_HEAVY = {
    "Embedder": "vector_index.embedder",
    "QdrantEdgeIndex": "vector_index.qdrant_edge",
    "QdrantRemoteIndex": "vector_index.qdrant_remote",
}


def __getattr__(name: str) -> object:
    if name in _HEAVY:
        return getattr(import_module(_HEAVY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "Candidate",
    "CircuitState",
    "DiskSpace",
    "Embedder",
    "EmbedderError",
    "Entry",
    "Failure",
    "FailureReason",
    "Hit",
    "IndexPausedError",
    "IndexSchema",
    "IndexSchemaError",
    "IndexUnavailableError",
    "Nomination",
    "Nominator",
    "NominatorSettings",
    "PromptRecord",
    "PromptText",
    "QdrantEdgeIndex",
    "QdrantRemoteIndex",
    "TextEmbedder",
    "VectorIndex",
    "VectorIndexError",
    "embed_prompts",
    "megabytes",
    "windows",
]
