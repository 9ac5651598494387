"""The nominator's settings, inputs and results."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from vector_index.circuit import Failure
from vector_index.prompt_text import PromptText, TextEmbedder
from vector_index.schema import IndexSchema

_TOKENS_PER_FINGERPRINT = 4

Source = Literal["prefix", "fingerprint", "meaning"]


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
        """The limit for a prompt of this length."""
        return max(self.max_fingerprints, num_tokens // _TOKENS_PER_FINGERPRINT)

    def schema(self, embedder: TextEmbedder | None) -> IndexSchema:
        """What an index for these settings must have been built with."""
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
