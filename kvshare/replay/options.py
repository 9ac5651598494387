"""The options of a replay, and how its documents describe them and what was replayed."""

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import kvshare
from kvshare.replay.policies import PolicySpec
from kvshare.replay.policies.base import BatchEmbeddings, PolicyContext
from kvshare.replay.results import Data, Document, LogFile
from kvshare.replay.stream import RequestStream
from kvshare.replay.tokens import RequestTokenizer
from kvshare.settings import Settings
from vector_index import TextEmbedder

LLAMA3_8B_BYTES_PER_TOKEN = 131_072  # 32 layers, 8 KV heads of 128, K and V, bfloat16
_LIBRARIES = ("numpy", "pyarrow", "qdrant-edge-py", "RapidFuzz", "tokenizers", "sentence-transformers")

Report = Callable[[int, int | None], None]  # (requests done, all) or (requests read so far, None)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """The log to replay, and the policies. `capacities_tokens`: finite stores, besides the infinite one."""

    paths: Sequence[Path]
    out: Path
    policies: Sequence[PolicySpec]
    settings: Settings
    format_name: str | None = None
    tokenizer: str | None = None
    capacities_tokens: Sequence[int] = ()
    bytes_per_token: int = LLAMA3_8B_BYTES_PER_TOKEN
    prefill_tokens_per_s: float = 5000.0
    limit: int | None = None
    seed: int = 0
    interleave: int = 1
    checkpoint_every: int = 1000  # requests

    def stream(self, report: Report) -> RequestStream:
        """Return the files' requests; while files are read, `report` is given how many there are so far."""
        return RequestStream(
            self.paths,
            format_name=self.format_name,
            interleave=self.interleave,
            seed=self.seed,
            limit=self.limit,
            reading=lambda num_read: report(num_read, None),
        )

    @property
    def embeds(self) -> bool:
        return any(spec.embeds for spec in self.policies)

    def embeddings(self, embedder: TextEmbedder | None) -> BatchEmbeddings:
        """By default of the embedder of config.yaml, with all cores, as a replay serves no requests."""
        if embedder is None:
            from vector_index import Embedder  # imports torch

            embedder = Embedder.for_bulk(self.settings.index.embedder)
        return BatchEmbeddings(embedder)

    def context(self, embeddings: BatchEmbeddings | None) -> PolicyContext:
        return PolicyContext(self.settings, self.bytes_per_token, self.prefill_tokens_per_s, embeddings)


def describe_options(
    options: ReplayOptions, tokenizer: RequestTokenizer, embeddings: BatchEmbeddings | None
) -> Document:
    """Return the options without paths, and those settings that a figure may depend on."""
    settings, given = options.settings, options.tokenizer
    numbers = ("bytes_per_token", "prefill_tokens_per_s", "limit", "seed", "interleave")
    return {
        "arms": [spec.text for spec in options.policies],
        "capacities_tokens": list(options.capacities_tokens),
        **{name: getattr(options, name) for name in numbers},
        "format": options.format_name,
        "tokenizer": {
            "name": tokenizer.name,
            "sha256": tokenizer.digest,
            "option": f"./{Path(given).name}" if given and Path(given).exists() else given,
        },
        "embedder": None if embeddings is None else Path(embeddings.name).name,  # without its folder
        "settings": {
            **{name: getattr(settings, name).model_dump() for name in ("sharing", "repair", "cost")},
            "index": settings.index.model_dump(exclude={"url", "embedder", "collection", "backend"}),
        },
    }


def describe_files(paths: Sequence[Path]) -> tuple[LogFile, ...]:
    """Names without folders, sizes and hashes."""
    return tuple(
        LogFile(name=path.name, num_bytes=path.stat().st_size, sha256=_sha256(path))
        for path in paths
        if path.is_file()
    )


def describe_log(options: ReplayOptions, stream: RequestStream) -> Document:
    """Return the files, and which rows of them could not be read."""
    data = Data(files=describe_files(options.paths), unreadable=stream.report.unreadable())
    return data.model_dump(include={"files", "unreadable"}, mode="json")


def versions() -> dict[str, str | None]:
    """Return the versions of everything that a figure may depend on; None: not installed."""
    versions: dict[str, str | None] = {"kvshare": kvshare.__version__, "python": platform.python_version()}
    for distribution in _LIBRARIES:
        name = distribution.lower().removesuffix("-py").replace("-", "_")
        try:
            versions[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
