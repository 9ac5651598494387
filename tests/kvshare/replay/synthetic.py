"""Small streams of requests made of numbers: what the arms' tests replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from delta_tree import token_ids
from kvshare.logs.requests import LoggedRequest
from kvshare.replay.policies.base import BatchEmbeddings, PolicyContext
from kvshare.replay.requests import TokenizedRequest
from kvshare.settings import load_settings

Tokens = Sequence[int]


def request(
    index: int,
    tokens: Tokens,
    *,
    answer: Tokens = (),
    namespace: str = "default",
    user: str | None = None,
    text: str = "",
    conversation: str | None = None,
    turn: int = 0,
    language: str = "unknown",
) -> TokenizedRequest:
    """One request of a stream, whose user is its conversation unless told."""
    conversation = conversation or f"c{index}"
    logged = LoggedRequest(
        source="synthetic",
        line=index + 1,
        conversation=conversation,
        turn=turn,
        user=user or conversation,
        token_ids=tuple(tokens),
        namespace=namespace,
        language=language,
    )
    return TokenizedRequest(
        index=index,
        logged=logged,
        token_ids=token_ids(list(tokens)),
        answer_ids=token_ids(list(answer)),
        text=text,
        time_s=float(index),
    )


def stream(prompts: Sequence[Tokens], **options: Any) -> list[TokenizedRequest]:
    """One request a prompt."""
    return [request(index, tokens, **options) for index, tokens in enumerate(prompts)]


def random_tokens(rng: np.random.Generator, length: int) -> list[int]:
    """Tokens that repeat nothing of note."""
    return [int(token) for token in rng.integers(0, 30_000, length)]


class FakeEmbedder:
    """Unit vectors by the words of a text: texts that share words are near."""

    name = "fake"
    dimension = 64

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dimension), dtype=np.float32)
        for row, text in zip(vectors, texts, strict=True):
            for word in text.split():
                row[sum(word.encode()) * 31 % self.dimension] += 1.0
            row /= max(float(np.linalg.norm(row)), 1e-9)
        return vectors


def policy_context(
    *, embeddings: bool = False, punctuation_ids: frozenset[int] = frozenset()
) -> PolicyContext:
    """The settings of config.yaml, 10 bytes a token."""
    return PolicyContext(
        settings=load_settings(),
        bytes_per_token=10,
        prefill_tokens_per_s=1000.0,
        embeddings=BatchEmbeddings(FakeEmbedder()) if embeddings else None,
        punctuation_ids=punctuation_ids,
        explain_losses=True,
    )
