"""
Merges what the stages of one nomination found into one ranked list of candidates.

A prompt that several stages found is one candidate with several sources. Candidates are ranked by the
estimated share of the new prompt that they cover. The best candidate with the longest exact prefix always
comes first, because exact reuse is worth more than any estimate.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from vector_index.base import Hit
from vector_index.circuit import Failure
from vector_index.nomination import Candidate, Nomination, Source
from vector_index.prefix_table import PrefixHit


@dataclass(slots=True)
class _Finding:
    sources: list[Source] = field(default_factory=list)
    score: float = 0.0
    similarity: float | None = None


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
    _findings: dict[int, _Finding] = field(default_factory=dict)

    @property
    def uncovered(self) -> float:
        """Estimated share of the prompt that neither the longest prefix nor any passage covers."""
        return self._after_prefix * (1.0 - self.covered_rest)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens of the longest known prefix."""
        return self.prefix.num_tokens if self.prefix else 0

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Measure how long a stage takes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.stage_seconds[stage] = time.perf_counter() - started

    def add_prefix(self, hit: PrefixHit) -> None:
        """Add the prompts with the longest common prefix."""
        self.prefix = hit
        for prompt_id in hit.prompt_ids:
            self._finding(prompt_id, "prefix").score += hit.num_tokens / self.num_tokens

    def add_passages(self, hit: Hit, *, shares_prefix: bool) -> None:
        """
        Add a prompt that shares passages after the longest prefix, and perhaps the prefix too.

        Call it with the most useful prompt first: where there are too many, the later ones are dropped.
        """
        finding = self._finding(hit.prompt_id, "fingerprint")
        if shares_prefix and "prefix" not in finding.sources:
            finding.sources.insert(0, "prefix")
            finding.score += self.num_prefix_tokens / self.num_tokens
        finding.score += hit.score * self._after_prefix

    def add_embeddings(self, hits: Sequence[Hit]) -> None:
        """Add prompts with near embeddings; the score of these hits is the cosine similarity."""
        for hit in hits:
            self._finding(hit.prompt_id, "meaning").similarity = hit.score

    def nomination(self, max_candidates: int) -> Nomination:
        """
        The best `max_candidates` candidates, ranked.

        One found by prefix is always among them. A quarter of the places is reserved for candidates that
        were found by embedding alone.
        """
        candidates = [
            Candidate(prompt_id, tuple(found.sources), found.score, found.similarity)
            for prompt_id, found in self._findings.items()
        ]
        best_prefix = sorted((c for c in candidates if "prefix" in c.sources), key=_rank)[:1]
        by_passage = [c for c in candidates if "fingerprint" in c.sources]
        by_embedding = [c for c in candidates if c.sources == ("meaning",)]
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

    def _finding(self, prompt_id: int, source: Source) -> _Finding:
        finding = self._findings.setdefault(prompt_id, _Finding())
        finding.sources.append(source)
        return finding


def _rank(candidate: Candidate) -> tuple[float, float, int]:
    """Sort key: the larger score first, then the larger similarity, then the newer prompt."""
    return (-candidate.score, -(candidate.similarity or 0.0), -candidate.prompt_id)
