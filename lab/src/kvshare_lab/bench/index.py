"""
`kvshare bench index`: time to nominate donors among very many stored prompts, and the disk and memory that
the index takes. No model, no planning.

One namespace has `stored` prompts; a hundred small namespaces have a tenth as many together. Prompts are
random tokens, embeddings random vectors in groups. Half of the prompts have the same long passage (a system
prompt) behind a head of their own: the prefix table does not find it, and its fingerprints are the most
common ones.
"""

import resource
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvshare.errors import ConfigError
from kvshare_lab.bench.figures import (
    PeakMemory,
    drop_from_page_cache,
    grown,
    memory_bytes,
    percentiles,
    shard_bytes,
)
from kvshare_lab.bench.harness import timed
from vector_index import Nominator, NominatorSettings, PromptRecord, PromptText, QdrantEdgeIndex, TextEmbedder

MIN_TOKENS = 192
_DIMENSION = 384
_VOCABULARY = 32_000
_HEAD, _TAIL = 32, 64  # tokens before and after the passage that half of the prompts share
_NEAR = 50  # prompts per group of near embeddings
_NOISE = 0.12  # of a vector in its group: cosine distances of 0.02 to 0.04
_SAMPLES_PER_BATCH = 8
_KINDS = ("prefix", "passage", "common", "unknown", "embedding")  # of queries
_LARGE, _NUM_SMALL = "large", 100
_BATCH = 1024
_FLUSH_EVERY = 64 * _BATCH


async def run(
    *, stored: int = 100_000, prompt_tokens: int = 500, queries: int = 200, dense: bool = True, seed: int = 0
) -> dict[str, Any]:
    """
    Build an index of `stored` prompts, optimised meanwhile as in a server. Query it as it was written, then
    optimised: cold and warm. Raises ConfigError for prompts that are too short.
    """
    if prompt_tokens < MIN_TOKENS:
        raise ConfigError("--prompt-tokens", f"must be at least {MIN_TOKENS}, got {prompt_tokens}")
    corpus = Corpus(np.random.default_rng(seed), prompt_tokens, stored, dense=dense)
    embedder = corpus if dense else None
    settings = NominatorSettings(search_timeout_s=60.0, embed_timeout_s=60.0, write_timeout_s=600.0)
    with tempfile.TemporaryDirectory(prefix="kvshare-bench-index-") as name:
        index = QdrantEdgeIndex(settings.schema(embedder), Path(name))
        nominator = Nominator(index, embedder=embedder, settings=settings)
        with PeakMemory() as peak:
            measured = await _build_and_ask(corpus, nominator, index, Path(name), stored, queries)
        nominator.close()
        await index.close()
    return {
        **measured,
        "peak_own_bytes": peak.own_bytes,
        "peak_bytes": peak.bytes,
        "optimiser_peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
    }


class Corpus(TextEmbedder):
    """Makes prompts and queries. As an embedder it returns the vectors that it made: no model runs."""

    name = "bench"
    dimension = _DIMENSION

    def __init__(self, rng: np.random.Generator, num_tokens: int, num_prompts: int, *, dense: bool) -> None:
        self._rng = rng
        self._num_tokens = num_tokens
        self._passage = self._tokens(num_tokens - _HEAD - _TAIL)
        self._groups = rng.standard_normal((max(1, num_prompts // _NEAR), _DIMENSION), dtype=np.float32)
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self.dense = dense
        self.samples: list[PromptRecord] = []  # that queries may be made from

    def _tokens(self, *shape: int) -> NDArray[np.int32]:
        return self._rng.integers(0, _VOCABULARY, shape, dtype=np.int32)

    def records(self, first_id: int, namespaces: Sequence[str]) -> list[PromptRecord]:
        """New prompts, one for each of these namespaces; every other prompt has the shared passage."""
        tokens = self._tokens(len(namespaces), self._num_tokens)
        tokens[::2, _HEAD : _HEAD + len(self._passage)] = self._passage
        self._vectors.clear()
        records = [
            PromptRecord(first_id + place, namespace, tokens[place], self._text(first_id + place))
            for place, namespace in enumerate(namespaces)
        ]
        first = records[:_SAMPLES_PER_BATCH]  # with tokens of their own, not a part of all
        self.samples += [replace(record, token_ids=record.token_ids.copy()) for record in first]
        return records

    def query(self, kind: str, stored: PromptRecord) -> tuple[NDArray[np.int32], PromptText | None]:
        """A prompt of this kind, and its text if donors are to be found by embedding."""
        self._vectors.clear()
        if kind == "prefix":  # a continuation of the stored prompt
            return np.concatenate([stored.token_ids, self._tokens(_HEAD)]), None
        if kind == "passage":  # another head: only fingerprints find the donor
            return np.concatenate([self._tokens(_HEAD), stored.token_ids[_HEAD:]]), None
        if kind == "common":  # equal only in what half of the namespace shares
            return np.concatenate([self._tokens(_HEAD), self._passage, self._tokens(_TAIL)]), None
        text = self._text(stored.prompt_id) if kind == "embedding" else None
        return self._tokens(self._num_tokens), text

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.stack([self._vectors[text] for text in texts])

    def _text(self, prompt_id: int) -> PromptText | None:
        """A text whose vector is near those of the prompt's group; None without embeddings."""
        if not self.dense:
            return None
        noise = self._rng.standard_normal(_DIMENSION, dtype=np.float32)
        vector = self._groups[prompt_id % len(self._groups)] + np.float32(_NOISE) * noise
        self._vectors[f"{prompt_id}"] = vector / np.linalg.norm(vector)
        return PromptText(f"{prompt_id}", "")


async def _build_and_ask(
    corpus: Corpus, nominator: Nominator, index: QdrantEdgeIndex, folder: Path, stored: int, queries: int
) -> dict[str, Any]:
    """The index stays open."""
    seconds: dict[str, float] = {}
    await index.open()
    before = memory_bytes()
    _, seconds["build"] = await timed(_fill(corpus, nominator, index, stored))
    memory = {"built": grown(before)}
    arms = {"as_written": await _measure(corpus, nominator, queries)}
    _, seconds["optimise"] = await timed(index.optimise())
    await index.close()
    disk = shard_bytes(folder / "shard")
    drop_from_page_cache(folder)
    _, seconds["open_cold"] = await timed(index.open())
    for arm in ("cold", "warm"):
        arms[arm] = await _measure(corpus, nominator, queries)
    memory["after_queries"] = grown(before)
    return {
        "points": await index.count(),
        "dimension": corpus.dimension if corpus.dense else 0,
        "p99_ms": max(kind["p99_ms"] for space in arms["warm"].values() for kind in space.values()),
        "nomination": arms,
        "seconds": {name: round(value, 2) for name, value in seconds.items()},
        "disk_bytes": disk,
        "memory_bytes": memory,
    }


async def _fill(corpus: Corpus, nominator: Nominator, index: QdrantEdgeIndex, stored: int) -> None:
    small = [f"small {number // 2 % _NUM_SMALL}" for number in range(stored // 10)]
    for first_id, namespaces in ((0, [_LARGE] * stored), (stored, small)):
        for start in range(0, len(namespaces), _BATCH):
            records = corpus.records(first_id + start, namespaces[start : start + _BATCH])
            await nominator.remember_all(records, batch_size=256)
            if start % _FLUSH_EVERY == 0:
                await index.maintain()
    await index.maintain()


async def _measure(corpus: Corpus, nominator: Nominator, num_queries: int) -> dict[str, dict[str, Any]]:
    """By kind of namespace and of query: times, and the share of queries whose donor was found."""
    rng = np.random.default_rng(1)
    kinds = _KINDS if corpus.dense else _KINDS[:-1]
    measured: dict[str, dict[str, Any]] = {}
    for space, is_large in (("large", True), ("small", False)):
        own = [each for each in corpus.samples if (each.namespace == _LARGE) is is_large]
        for kind in kinds if own else ():
            asked = [own[place] for place in rng.integers(0, len(own), num_queries)]
            measured.setdefault(space, {})[kind] = await _ask(corpus, nominator, kind, asked)
    return measured


async def _ask(
    corpus: Corpus, nominator: Nominator, kind: str, asked: Sequence[PromptRecord]
) -> dict[str, Any]:
    seconds, num_found, num_failures = [], 0, 0
    for stored in asked:
        tokens, text = corpus.query(kind, stored)
        nominating = nominator.nominate(stored.namespace, tokens, text, allow_dense=text is not None)
        nomination, taken = await timed(nominating)
        seconds.append(taken)
        num_failures += len(nomination.failures)
        if kind in ("prefix", "passage"):
            num_found += stored.prompt_id in {candidate.prompt_id for candidate in nomination.candidates}
        elif kind == "embedding":
            num_found += any(candidate.similarity is not None for candidate in nomination.candidates)
        else:
            num_found += bool(nomination.candidates)
    return {**percentiles(seconds), "found": num_found / len(asked), "failures": num_failures}
