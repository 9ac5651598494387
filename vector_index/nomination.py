"""
The nominator's settings, inputs and results, and how the results of its stages become one ranked list.

A prompt that several stages found is one candidate with several sources. Candidates are ranked by the
estimated share of the new prompt that they cover. The best candidate with the longest exact prefix always
comes first, because exact reuse is worth more than any estimate.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vector_index.base import Hit, IndexSchema
from vector_index.circuit import Failure
from vector_index.prefix_table import PrefixHit
from vector_index.prompt_text import PromptText, TextEmbedder

_TOKENS_PER_FINGERPRINT = 4

Source = Literal["prefix", "fingerprint", "embedding"]


@dataclass(frozen=True, slots=True)
class NominatorSettings:
    """
    Limits of the searches. Units: tokens, seconds.

    kgram, window         a common stretch of kgram + window - 1 tokens is always found
    max_holders           prompts of a namespace that are stored with one fingerprint; later prompts are
                          stored without it, which bounds the cost of a fingerprint that all prompts share
    max_postings          limit of a search's cost: the number of stored prompts read, summed over the queried
                          fingerprints (about 1.3 ns each); rare fingerprints are queried first
    min_asked             fingerprints queried even if all are common; and the least number of uncovered
                          fingerprints for another search
    max_asked             fingerprints per query, because the event loop waits for the answer. Of a longer
                          prompt every n-th is queried; what the hits leave uncovered is searched again
    max_fingerprints      of a prompt of up to 8,192 tokens; of a longer one, one per four tokens. Usual
                          prompts have one per five tokens, so this limits crafted prompts only
    dense_min_uncovered   least share of the prompt that prefix and fingerprints leave uncovered
    max_distance          cosine distance of embeddings
    write_timeout_s       for indexing after the response; long, because an index may be optimising
    """

    kgram: int = 8
    window: int = 9
    max_fingerprints: int = 2048
    block_size: int = 32
    max_candidates: int = 8
    max_holders: int = 10_000
    max_postings: int = 100_000
    min_asked: int = 4
    max_asked: int = 2048
    max_distance: float = 0.05
    dense_min_tokens: int = 256
    dense_min_uncovered: float = 0.5
    search_timeout_s: float = 0.05
    embed_timeout_s: float = 0.25
    write_timeout_s: float = 30.0
    failures_to_open: int = 5
    open_s: float = 30.0

    def max_fingerprints_of(self, num_tokens: int) -> int:
        """Return the limit for a prompt of this length."""
        return max(self.max_fingerprints, num_tokens // _TOKENS_PER_FINGERPRINT)

    def schema(self, embedder: TextEmbedder | None) -> IndexSchema:
        """Return the schema that an index for these settings must have been built with."""
        return IndexSchema(
            kgram=self.kgram,
            window=self.window,
            max_fingerprints=self.max_fingerprints,
            embedder=embedder.name if embedder else "",
            dimension=embedder.dimension if embedder else 0,
        )


@dataclass(frozen=True, slots=True)
class Candidate:
    """
    A donor that was nominated and not yet aligned.

    `score` estimates the share of the prompt's tokens that the donor has too, 0 to 1; it is 0 for
    a candidate found by embedding alone. `similarity` is the cosine similarity if embedding found it.
    """

    prompt_id: int
    sources: tuple[Source, ...]
    score: float
    similarity: float | None = None


@dataclass(frozen=True, slots=True)
class Nomination:
    """
    Candidates, best first, without repeats; `failures` has the searches that were too slow or failed.

    `num_prefix_tokens` is how many leading tokens the first prefix candidate shares at least.
    """

    candidates: tuple[Candidate, ...]
    num_prefix_tokens: int
    stage_seconds: Mapping[str, float]
    failures: tuple[Failure, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PromptRecord:
    """A prompt to index. Shapes: token_ids (T,) int32."""

    prompt_id: int
    namespace: str
    token_ids: NDArray[np.int32]
    prompt_text: PromptText | None = None


@dataclass(slots=True)
class Ranking:
    """
    The findings of one nomination.

    `num_tokens` is the prompt's length. `covered_rest` is the share of the tokens after the longest prefix
    that the donors found by passages cover together.
    """

    num_tokens: int
    prefix: PrefixHit | None = None
    covered_rest: float = 0.0
    failures: list[Failure] = field(default_factory=list)
    stage_seconds: dict[str, float] = field(default_factory=dict)
    _found: dict[int, Candidate] = field(default_factory=dict)

    @property
    def uncovered(self) -> float:
        """Estimated share of the prompt that neither the longest prefix nor any passage covers."""
        return self._after_prefix * (1.0 - self.covered_rest)

    @property
    def num_prefix_tokens(self) -> int:
        return self.prefix.num_tokens if self.prefix else 0

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stage_seconds[stage] = time.perf_counter() - started

    def add_prefix(self, hit: PrefixHit) -> None:
        self.prefix = hit
        for prompt_id in hit.prompt_ids:
            self._add(prompt_id, "prefix", hit.num_tokens / self.num_tokens)

    def add_passages(self, hit: Hit, *, shares_prefix: bool) -> None:
        """
        Add a prompt that shares passages after the longest prefix, and perhaps the prefix too.

        Call it with the most useful prompt first: where there are too many, the later ones are dropped.
        """
        if shares_prefix and hit.prompt_id not in self._found:
            self._add(hit.prompt_id, "prefix", self.num_prefix_tokens / self.num_tokens)
        self._add(hit.prompt_id, "fingerprint", hit.score * self._after_prefix)

    def add_embeddings(self, hits: Sequence[Hit]) -> None:
        """Add prompts with near embeddings; the score of these hits is the cosine similarity."""
        for hit in hits:
            self._add(hit.prompt_id, "embedding", 0.0, hit.score)

    def nomination(self, max_candidates: int) -> Nomination:
        """
        Return the best `max_candidates` candidates, ranked.

        One found by prefix is always among them. A quarter of the places is reserved for candidates that
        were found by embedding alone.
        """
        candidates = list(self._found.values())
        best_prefix = sorted((c for c in candidates if "prefix" in c.sources), key=_rank)[:1]
        by_passage = [c for c in candidates if "fingerprint" in c.sources]
        by_embedding = [c for c in candidates if c.sources == ("embedding",)]
        num_reserved = min(len(by_embedding), max_candidates // 4)
        wanted = (
            best_prefix
            + by_passage[: max_candidates - num_reserved - len(best_prefix)]
            + by_embedding[:num_reserved]
            + candidates
        )
        kept = list(dict.fromkeys(wanted))[:max_candidates]
        rest = sorted((c for c in kept if c not in best_prefix), key=_rank)
        return Nomination(
            candidates=(*best_prefix, *rest),
            num_prefix_tokens=self.num_prefix_tokens,
            stage_seconds=self.stage_seconds,
            failures=tuple(self.failures),
        )

    @property
    def _after_prefix(self) -> float:
        return 1.0 - self.num_prefix_tokens / max(self.num_tokens, 1)

    def _add(self, prompt_id: int, source: Source, score: float, similarity: float | None = None) -> None:
        known = self._found.get(prompt_id, Candidate(prompt_id, (), 0.0))
        sources = (*known.sources, source)
        self._found[prompt_id] = Candidate(prompt_id, sources, known.score + score, similarity)


def _rank(candidate: Candidate) -> tuple[float, float, int]:
    """Sort key: the larger score first, then the larger similarity, then the newer prompt."""
    return (-candidate.score, -(candidate.similarity or 0.0), -candidate.prompt_id)
