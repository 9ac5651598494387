"""What a replay is asked to do, and how `results.json` says what was replayed and with what."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import kvshare
from kvshare.replay.arms import ArmSpec, Meanings, Workbench
from kvshare.replay.results import Data, Document, LogFile
from kvshare.replay.stream import RequestStream
from kvshare.replay.tokens import RequestTokenizer
from kvshare.settings import Settings
from vector_index import TextEmbedder

LLAMA3_8B_BYTES_PER_TOKEN = 131_072  # 32 layers, 8 KV heads of 128, K and V, bfloat16
_FIGURED = ("bytes_per_token", "prefill_tokens_per_s", "limit", "seed", "interleave")
_LIBRARIES = {
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "qdrant_edge": "qdrant-edge-py",
    "rapidfuzz": "RapidFuzz",
    "tokenizers": "tokenizers",
    "sentence_transformers": "sentence-transformers",
}

Report = Callable[[int, int | None], None]  # requests done, in all; or requests read so far, None


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """What a replay is asked to do. `capacities_tokens`: finite stores, beside the infinite one."""

    paths: Sequence[Path]
    out: Path
    arms: Sequence[ArmSpec]
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


def make_meanings(options: ReplayOptions, embedder: TextEmbedder | None) -> Meanings | None:
    """The embeddings, if an arm needs any; `embedder` None is the bundled one, or what config.yaml names."""
    if not any(spec.embeds for spec in options.arms):
        return None
    return Meanings(embedder or bundled_embedder(options))


def make_stream(options: ReplayOptions, report: Report) -> RequestStream:
    """The files' requests; while they are read, `report` is told how many there were so far."""
    return RequestStream(
        options.paths,
        format_name=options.format_name,
        interleave=options.interleave,
        seed=options.seed,
        limit=options.limit,
        reading=lambda num_read: report(num_read, None),
    )


def make_bench(
    options: ReplayOptions,
    meanings: Meanings | None,
    *,
    light_ids: frozenset[int] = frozenset(),
    explain_losses: bool = True,
) -> Workbench:
    """What the arms are made with."""
    return Workbench(
        settings=options.settings,
        bytes_per_token=options.bytes_per_token,
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        meanings=meanings,
        light_ids=light_ids,
        explain_losses=explain_losses,
    )


def bundled_embedder(options: ReplayOptions) -> TextEmbedder:
    """The embedder of config.yaml, as fast as it goes: nobody is served beside a replay."""
    from vector_index import Embedder  # imports torch

    return Embedder.for_bulk(options.settings.index.embedder)


def config_document(
    options: ReplayOptions, tokenizer: RequestTokenizer, meanings: Meanings | None
) -> Document:
    """The options without paths; of the settings what a figure may depend on."""
    settings = options.settings
    return {
        "arms": [spec.text for spec in options.arms],
        "capacities_tokens": list(options.capacities_tokens),
        **{name: getattr(options, name) for name in _FIGURED},
        "format": options.format_name,
        "tokenizer": {"name": tokenizer.name, "sha256": tokenizer.digest},
        "embedder": None if meanings is None else Path(meanings.name).name,  # a path would tell folders
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


def data_document(options: ReplayOptions, stream: RequestStream) -> Document:
    """The files, and what of them could not be read."""
    data = Data(files=describe_files(options.paths), unreadable=stream.report.unreadable())
    return data.model_dump(include={"files", "unreadable"}, mode="json")


def versions() -> dict[str, str | None]:
    """Of everything a figure may depend on."""
    found: dict[str, str | None] = {"kvshare": kvshare.__version__, "python": platform.python_version()}
    for name, distribution in _LIBRARIES.items():
        try:
            found[name] = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
