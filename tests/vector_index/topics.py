"""Prompts, and an embedder that knows their topics."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vector_index import (
    Nomination,
    NominatorSettings,
)

SETTINGS = NominatorSettings(
    block_size=16, max_distance=0.2, dense_min_tokens=100, search_timeout_s=5, embed_timeout_s=5
)


class TopicEmbedder:
    """Knows two topics and counts how often it is asked."""

    name = "topics"
    dimension = 2

    def __init__(self) -> None:
        self.num_texts = 0

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.num_texts += len(texts)
        rows = [[1.0, 0.0] if "weather" in text else [0.0, 1.0] for text in texts]
        return np.array(rows, dtype=np.float32)


def tokens(seed: int, size: int = 400) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 30_000, size, dtype=np.int32)


def ids(nomination: Nomination) -> list[int]:
    assert nomination.failures == ()
    return [candidate.prompt_id for candidate in nomination.candidates]
