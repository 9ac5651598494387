"""
`kvshare bench index`: time to nominate donors among very many stored prompts, and the disk and memory that
the index takes. No model, no planning.

One namespace has `stored` prompts, half of them with the same long passage; a hundred small namespaces have a
tenth as many together.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvshare.bench.figures import drop_from_page_cache, grown, memory_bytes, percentiles, shard_bytes
from kvshare.bench.index_corpus import MIN_TOKENS, Corpus, Stored
from kvshare.errors import ConfigError
from vector_index import Nominator, NominatorSettings, QdrantEdgeIndex

_LARGE, _NUM_SMALL = "large", 100
_BATCH = 1024
_FLUSH_EVERY = 64 * _BATCH


async def run(
    *,
    stored: int = 100_000,
    prompt_tokens: int = 500,
    queries: int = 200,
    dense: bool = True,
    seed: int = 0,
) -> dict[str, Any]:
    """
    Build an index of `stored` prompts, optimised meanwhile as in a server. Query it as it was written, then
    optimised: cold and warm.

    Raises:  ConfigError for prompts that are too short
    """
    if prompt_tokens < MIN_TOKENS:
        raise ConfigError("--prompt-tokens", f"must be at least {MIN_TOKENS}, got {prompt_tokens}")
    corpus = Corpus(np.random.default_rng(seed), prompt_tokens, stored, dense=dense)
    embedder = corpus if dense else None
    settings = NominatorSettings(search_timeout_s=60.0, embed_timeout_s=60.0, write_timeout_s=600.0)
    with tempfile.TemporaryDirectory(prefix="kvshare-bench-index-") as name:
        index = QdrantEdgeIndex(settings.schema(embedder), Path(name))
        nominator = Nominator(index, embedder=embedder, settings=settings)
        measured = await _build_and_ask(corpus, nominator, index, Path(name), stored, queries)
        num_points = await index.count()
        nominator.close()
        await index.close()
    return {
        "points": num_points,
        "dimension": corpus.dimension if dense else 0,
        **measured,
        "optimiser_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    }


async def _build_and_ask(
    corpus: Corpus, nominator: Nominator, index: QdrantEdgeIndex, folder: Path, stored: int, queries: int
) -> dict[str, Any]:
    """The index stays open."""
    seconds: dict[str, float] = {}

    async def timed(name: str, work: Awaitable[object]) -> None:
        began = time.perf_counter()
        await work
        seconds[name] = round(time.perf_counter() - began, 2)

    await index.open()
    before = memory_bytes()
    await timed("build", _fill(corpus, nominator, index, stored))
    memory = {"built": grown(before)}
    arms = {"as_written": await _measure(corpus, nominator, queries)}
    await timed("optimise", index.optimise())
    await index.close()
    disk = shard_bytes(folder / "shard")
    drop_from_page_cache(folder)
    await timed("open_cold", index.open())
    for arm in ("cold", "warm"):
        arms[arm] = await _measure(corpus, nominator, queries)
    memory["after_queries"] = grown(before)
    return {
        "p99_ms": max(kind["p99_ms"] for space in arms["warm"].values() for kind in space.values()),
        "nomination": arms,
        "seconds": seconds,
        "disk_bytes": disk,
        "memory_bytes": memory,
    }


async def _fill(corpus: Corpus, nominator: Nominator, index: QdrantEdgeIndex, stored: int) -> None:
    small = [f"small {number // 2 % _NUM_SMALL}" for number in range(stored // 10)]
    prompt_id = 0
    for namespaces in ([_LARGE] * stored, small):
        for start in range(0, len(namespaces), _BATCH):
            records = corpus.records(prompt_id, namespaces[start : start + _BATCH])
            await nominator.remember_all(records, batch_size=256)
            prompt_id += len(records)
            if start % _FLUSH_EVERY == 0:
                await index.maintain()
    await index.maintain()


async def _measure(corpus: Corpus, nominator: Nominator, num_queries: int) -> dict[str, dict[str, Any]]:
    """By kind of namespace and of query: times, and the share of queries whose donor was found."""
    rng = np.random.default_rng(1)
    spaces: dict[str, list[Stored]] = {"large": [], "small": []}
    for stored in corpus.samples:
        spaces["large" if stored.namespace == _LARGE else "small"].append(stored)
    measured: dict[str, dict[str, Any]] = {}
    for space, own in spaces.items():
        for kind in corpus.kinds if own else ():
            asked = [own[place] for place in rng.integers(0, len(own), num_queries)]
            measured.setdefault(space, {})[kind] = await _ask(corpus, nominator, kind, asked)
    return measured


async def _ask(corpus: Corpus, nominator: Nominator, kind: str, asked: Sequence[Stored]) -> dict[str, Any]:
    seconds, num_found, num_failures = [], 0, 0
    for stored in asked:
        tokens, text = corpus.query(kind, stored)
        began = time.perf_counter()
        nomination = await nominator.nominate(stored.namespace, tokens, text, allow_dense=text is not None)
        seconds.append(time.perf_counter() - began)
        num_failures += len(nomination.failures)
        if kind in ("prefix", "passage"):
            num_found += stored.prompt_id in {candidate.prompt_id for candidate in nomination.candidates}
        elif kind == "meaning":
            num_found += any(candidate.similarity is not None for candidate in nomination.candidates)
        else:
            num_found += bool(nomination.candidates)
    return {**percentiles(seconds), "found": num_found / len(asked), "failures": num_failures}
