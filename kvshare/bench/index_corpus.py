"""
Prompts, embeddings and queries for `kvshare bench index`: random tokens, and random vectors in groups.

Half of the prompts have the same long passage (a system prompt) behind a head of their own: the prefix table
does not find it, and its fingerprints are the most common ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vector_index import PromptRecord, PromptText, TextEmbedder

MIN_TOKENS = 192
_DIMENSION = 384
_VOCABULARY = 32_000
_HEAD, _TAIL = 32, 64  # tokens before and after the passage that half of the prompts share
_NEAR = 50  # prompts per group of near embeddings
_NOISE = 0.12  # of a vector in its group: cosine distances of 0.02 to 0.04
_SAMPLES_PER_BATCH = 8


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A stored prompt that queries may be made from."""

    prompt_id: int
    namespace: str
    tokens: NDArray[np.int32]
    group: int


class Corpus(TextEmbedder):
    """Makes prompts and queries. As an embedder it returns the vectors that it made: no model runs."""

    name = "bench"
    dimension = _DIMENSION

    def __init__(self, rng: np.random.Generator, num_tokens: int, num_prompts: int, *, dense: bool) -> None:
        self._rng = rng
        self._num_tokens = num_tokens
        self._passage = self._tokens(num_tokens - _HEAD - _TAIL)
        self._num_groups = max(1, num_prompts // _NEAR)
        shape = (self._num_groups, _DIMENSION)
        self._groups = rng.standard_normal(shape, dtype=np.float32) if dense else None
        self._vectors: dict[str, NDArray[np.float32]] = {}
        self.samples: list[Stored] = []

    def _tokens(self, *shape: int) -> NDArray[np.int32]:
        return self._rng.integers(0, _VOCABULARY, shape, dtype=np.int32)

    def records(self, first_id: int, namespaces: Sequence[str]) -> list[PromptRecord]:
        """New prompts, one for each of these namespaces; every other prompt has the shared passage."""
        tokens = self._tokens(len(namespaces), self._num_tokens)
        tokens[::2, _HEAD : _HEAD + len(self._passage)] = self._passage
        groups = self._rng.integers(0, self._num_groups, len(namespaces))
        self._vectors.clear()
        records = [
            PromptRecord(first_id + i, namespace, tokens[i], self._text(f"{first_id + i}", int(groups[i])))
            for i, namespace in enumerate(namespaces)
        ]
        self.samples += [
            Stored(record.prompt_id, record.namespace, record.token_ids.copy(), int(group))
            for record, group in zip(records[:_SAMPLES_PER_BATCH], groups, strict=False)
        ]
        return records

    def query(self, kind: str, stored: Stored) -> tuple[NDArray[np.int32], PromptText | None]:
        """A prompt of this kind, and its text if donors are to be found by embedding."""
        self._vectors.clear()
        if kind == "prefix":  # a continuation of the stored prompt
            return np.concatenate([stored.tokens, self._tokens(_HEAD)]), None
        if kind == "passage":  # another head: only fingerprints find the donor
            return np.concatenate([self._tokens(_HEAD), stored.tokens[_HEAD:]]), None
        if kind == "common":  # equal only in what half of the namespace shares
            return np.concatenate([self._tokens(_HEAD), self._passage, self._tokens(_TAIL)]), None
        if kind == "meaning":
            return self._tokens(self._num_tokens), self._text("query", stored.group)
        return self._tokens(self._num_tokens), None

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.stack([self._vectors[text] for text in texts])

    @property
    def kinds(self) -> tuple[str, ...]:
        return ("prefix", "passage", "common", "unknown", *(["meaning"] if self._groups is not None else []))

    def _text(self, name: str, group: int) -> PromptText | None:
        if self._groups is None:
            return None
        noise = self._rng.standard_normal(_DIMENSION, dtype=np.float32)
        vector = self._groups[group] + np.float32(_NOISE) * noise
        self._vectors[name] = vector / np.linalg.norm(vector)
        return PromptText(name, "")
