"""
Selects which parts of a prompt's text are embedded.

Small embedding models read a few hundred tokens, and the first few hundred of a prompt are often a common
system prompt. So the last user turn and the start and end of the body are embedded instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from vector_index.errors import EmbedderError

WINDOW_CHARS = 1000  # about the 256 tokens that MiniLM reads, in English


@dataclass(frozen=True, slots=True)
class PromptText:
    """The text of a prompt without its system prompt."""

    last_user_turn: str
    body: str


class TextEmbedder(Protocol):
    """Turns texts into unit vectors; safe to call from threads."""

    @property
    def name(self) -> str:
        """Return a part of the index's schema: equal names give equal vectors."""

    @property
    def dimension(self) -> int:
        """Return the length of the vectors."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return (N, D) float32, each row of length 1. Raises EmbedderError."""


def windows(prompt: PromptText) -> tuple[str, ...]:
    """
    Return up to three different windows: the last user turn, the body's head and the body's tail.

        Equal windows count once: a body that fits one window gives one, and a body that is only the user turn
        gives none. A prompt without text has no windows.
    """
    parts = (prompt.last_user_turn[:WINDOW_CHARS], prompt.body[:WINDOW_CHARS], prompt.body[-WINDOW_CHARS:])
    stripped = (part.strip() for part in parts)
    return tuple(dict.fromkeys(part for part in stripped if part))


def embed_prompts(embedder: TextEmbedder, prompts: Sequence[PromptText]) -> list[NDArray[np.float32] | None]:
    """
    Return one unit vector (D,) per prompt: the mean of its windows' vectors; None for a prompt without text.

    Raises:  EmbedderError, also when the embedder returns another shape or NaN
    """
    cut = [windows(prompt) for prompt in prompts]
    texts = [window for prompt_windows in cut for window in prompt_windows]
    if not texts:
        return [None] * len(prompts)
    vectors = embedder.embed(texts)
    if vectors.shape != (len(texts), embedder.dimension) or not np.isfinite(vectors).all():
        raise EmbedderError(
            f"embeddings have shape {vectors.shape} or are not finite, "
            f"expected ({len(texts)}, {embedder.dimension})"
        )
    per_prompt = np.split(vectors, np.cumsum([len(prompt_windows) for prompt_windows in cut])[:-1])
    return [_unit_mean(own) if len(own) else None for own in per_prompt]


def _unit_mean(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    mean = vectors.mean(axis=0, dtype=np.float64)
    length = max(float(np.linalg.norm(mean)), 1e-12)
    return np.asarray(mean / length, dtype=np.float32)
