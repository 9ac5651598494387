"""What was replayed and with what: the parts of `results.json` that no arm has to do with."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import kvshare
from kvshare.replay.histograms import Histogram
from kvshare.replay.requests import TokenizedRequest
from kvshare.replay.results import LENGTH_EDGES, Document, Row

_LIBRARIES = {
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "qdrant_edge": "qdrant-edge-py",
    "rapidfuzz": "RapidFuzz",
    "tokenizers": "tokenizers",
    "sentence_transformers": "sentence-transformers",
}
_MAX_LANGUAGES = 60


class DataSummary:
    """Counts requests and hashes their tokens, in order."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._sums: Counter[str] = Counter()
        self._languages: Counter[str] = Counter()
        self._lengths = Histogram(LENGTH_EDGES)
        self._conversations = self._users = self._namespaces = 0

    @property
    def digest(self) -> str:
        """Of everything so far that an arm's figures depend on, meaning aside."""
        return self._hash.hexdigest()

    def add(self, request: TokenizedRequest, common: Row) -> None:
        """`common`: see rows.py; numbers grow with what is new."""
        user = 0 if common["user"] is None else common["user"] + 1
        names = (common["namespace"], user, common["conversation"])
        frame = (*names, request.num_tokens, len(request.answer_ids))
        self._hash.update(b"".join(number.to_bytes(8, "little") for number in frame))
        self._hash.update(request.token_ids.astype("<i4", copy=False).tobytes())
        self._hash.update(request.answer_ids.astype("<i4", copy=False).tobytes())
        self._sums["requests"] += 1
        self._sums["tokens"] += request.num_tokens
        self._sums["answers"] += len(request.answer_ids)
        language = common["language"]
        if language not in self._languages and len(self._languages) >= _MAX_LANGUAGES:
            language = "other"
        self._languages[language] += 1
        self._lengths.add(request.num_tokens)
        self._conversations = max(self._conversations, common["conversation"] + 1)
        self._users = max(self._users, user)
        self._namespaces = max(self._namespaces, common["namespace"] + 1)

    def document(self) -> Document:
        return {
            "sha256": self.digest,
            "num_requests": self._sums["requests"],
            "num_tokens": self._sums["tokens"],
            "num_answer_tokens": self._sums["answers"],
            "num_conversations": self._conversations,
            "num_users": self._users,
            "num_namespaces": self._namespaces,
            "languages": dict(sorted(self._languages.items())),
            "length_histogram": self._lengths.document(),
        }


def describe_files(paths: Sequence[Path]) -> list[Document]:
    """Names without folders, sizes and hashes."""
    return [
        {"name": path.name, "num_bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in paths
        if path.is_file()
    ]


def versions() -> Document:
    """Of everything a figure may depend on."""
    found: Document = {"kvshare": kvshare.__version__, "python": platform.python_version()}
    for name, distribution in _LIBRARIES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
