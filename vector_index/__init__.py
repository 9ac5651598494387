"""
Which earlier prompts may share KV with a new one: found by token prefix, fingerprints and embedding.

`Nominator` is the class to start from. The backends and the embedder load heavy libraries, so they are
imported when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from vector_index.base import Entry as Entry
from vector_index.base import Hit as Hit
from vector_index.base import IndexSchema as IndexSchema
from vector_index.base import VectorIndex as VectorIndex
from vector_index.circuit import CircuitState as CircuitState
from vector_index.circuit import Failure as Failure
from vector_index.circuit import FailureReason as FailureReason
from vector_index.disk_space import DiskSpace as DiskSpace
from vector_index.disk_space import megabytes as megabytes
from vector_index.errors import EmbedderError as EmbedderError
from vector_index.errors import IndexPausedError as IndexPausedError
from vector_index.errors import IndexSchemaError as IndexSchemaError
from vector_index.errors import IndexUnavailableError as IndexUnavailableError
from vector_index.errors import VectorIndexError as VectorIndexError
from vector_index.nomination import Candidate as Candidate
from vector_index.nomination import Nomination as Nomination
from vector_index.nomination import NominatorSettings as NominatorSettings
from vector_index.nomination import PromptRecord as PromptRecord
from vector_index.nominator import Nominator as Nominator
from vector_index.prompt_text import PromptText as PromptText
from vector_index.prompt_text import TextEmbedder as TextEmbedder
from vector_index.prompt_text import embed_prompts as embed_prompts
from vector_index.prompt_text import windows as windows

if TYPE_CHECKING:
    from vector_index.embedder import Embedder as Embedder
    from vector_index.embedder import TokenCount as TokenCount
    from vector_index.qdrant_edge import QdrantEdgeIndex as QdrantEdgeIndex
    from vector_index.qdrant_remote import QdrantRemoteIndex as QdrantRemoteIndex

_HEAVY = {
    "Embedder": "embedder",
    "TokenCount": "embedder",
    "QdrantEdgeIndex": "qdrant_edge",
    "QdrantRemoteIndex": "qdrant_remote",
}


def __getattr__(name: str) -> object:
    if name in _HEAVY:
        return getattr(import_module(f"vector_index.{_HEAVY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
