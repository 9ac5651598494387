"""
A cache policy gets one request after the other and says what it would have reused of each.

A policy knows only the requests before. It never shares across namespaces and reports neither tokens nor
text. Policies that embed share the embeddings, which are made once for a batch of requests.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from delta_tree import TokenIds, token_ids
from kvshare.replay.requests import Outcome, TokenizedRequest
from kvshare.replay.results import EmbeddingTimes, Store, Tree, policy_label
from kvshare.settings import Settings
from vector_index import PromptText, TextEmbedder, embed_prompts, windows

T = TypeVar("T", bound=np.generic)
Vector = NDArray[np.float32]


class BatchEmbeddings:
    """
    An embedder that caches the vectors of the current batch, so that policies look up what was prepared.

    `num_texts` and `seconds` count what the real embedder had to do.
    """

    def __init__(self, real: TextEmbedder) -> None:
        self.name = real.name
        self._real = real
        self._cached: dict[str, Vector] = {}
        self.num_texts = 0
        self.seconds = 0.0

    @property
    def dimension(self) -> int:
        return self._real.dimension

    def prepare(self, requests: Sequence[TokenizedRequest]) -> None:
        """Embed what these requests need, and drop the vectors of the batch before."""
        texts = dict.fromkeys(window for request in requests for window in windows(prompt_text(request)))
        self._cached = {text: self._cached[text] for text in texts if text in self._cached}
        self._embed_new(sorted(texts, key=len))  # texts of similar length need little padding

    def embed(self, texts: Sequence[str]) -> Vector:
        self._embed_new(texts)
        return np.stack([self._cached[text] for text in texts])

    def of(self, request: TokenizedRequest) -> Vector | None:
        """Return the unit vector (D,) of a request; None if it has no text."""
        return embed_prompts(self, [prompt_text(request)])[0]

    @property
    def times(self) -> EmbeddingTimes:
        rate = self.num_texts / (self.seconds or 1)
        return EmbeddingTimes(num_texts=self.num_texts, seconds=self.seconds, texts_per_s=rate)

    def _embed_new(self, texts: Sequence[str]) -> None:
        if new := [text for text in dict.fromkeys(texts) if text not in self._cached]:
            began = time.perf_counter()
            self._cached.update(zip(new, self._real.embed(new), strict=True))
            self.seconds += time.perf_counter() - began
            self.num_texts += len(new)


def prompt_text(request: TokenizedRequest) -> PromptText:
    """Return a request's text as the nominator takes it."""
    return PromptText(request.text, "")


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The context that all policies of a replay have in common."""

    settings: Settings
    bytes_per_token: int
    prefill_tokens_per_s: float
    embeddings: BatchEmbeddings | None = None  # None: no policy may embed
    punctuation_ids: frozenset[int] = field(default_factory=frozenset)  # tokens without a letter or digit
    explain_losses: bool = False  # plan again to find what KVShare's thresholds cost; servers do not


@dataclass(eq=False)
class CachePolicy(ABC):
    """
    One policy with one store. `capacity_tokens` None: the store is infinite.

    Policies are used by one thread at a time and closed once. Their keyword-only fields are their options.
    """

    family: ClassVar = ""

    name: str
    context: PolicyContext
    capacity_tokens: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the options that distinguish this policy in its family; a 0 by default is left out."""
        own = [(each, getattr(self, each.name)) for each in fields(self) if each.kw_only]
        return {each.name: value for each, value in own if value or each.default}

    @property
    def store(self) -> Store:
        """Return the store's name in `results.json`."""
        capacity = self.capacity_tokens
        return Store(
            arm=self.name,
            label=policy_label(self.name, capacity),
            family=self.family,
            capacity_tokens=capacity,
            capacity_bytes=None if capacity is None else capacity * self.context.bytes_per_token,
            options=self.options,
        )

    @abstractmethod
    def observe(self, request: TokenizedRequest) -> Outcome:
        """Return what of a request would be reused after all requests before it; then store it."""

    def describe_tree(self) -> Tree | None:
        """Figures of the delta tree, for policies that have one."""
        return None

    def close(self) -> None:  # noqa: B027  most policies hold nothing but memory
        """Release everything."""


class NothingPolicy(CachePolicy):
    """No cache at all: the baseline of the others."""

    family = "nothing"

    def observe(self, request: TokenizedRequest) -> Outcome:
        return Outcome()


def stored_tokens(request: TokenizedRequest) -> TokenIds:
    """Return the tokens whose KV exists after the answer: those of the prompt and of the answer."""
    return token_ids(np.concatenate([request.token_ids, request.answer_ids]))


def with_room(rows: NDArray[T], num_rows: int) -> NDArray[T]:
    """The array itself if it has so many rows, else a copy of twice the length or more, zeros at its end."""
    if num_rows <= len(rows):
        return rows
    more = max(len(rows), num_rows - len(rows))
    return np.concatenate([rows, np.zeros((more, *rows.shape[1:]), rows.dtype)])
