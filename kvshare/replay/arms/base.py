"""
What an arm is: one way of caching, asked in turn what it would have reused of each request.

An arm knows only what it has observed before. It never shares over namespaces, and it never tells tokens or
text. Those that look at meaning share the requests' embeddings, made once, a batch of requests at a time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from delta_tree import TokenIds, token_ids
from kvshare.replay.requests import Outcome, TokenizedRequest
from kvshare.replay.results import arm_label
from kvshare.settings import Settings
from vector_index import PromptText, TextEmbedder, embed_prompts, windows

T = TypeVar("T", bound=np.generic)
Vector = NDArray[np.float32]


class Meanings(TextEmbedder):
    """
    An embedder that remembers the vectors of the batch at hand: what was prepared costs an arm nothing.

    `num_texts` and `seconds` are what the real embedder had to do.
    """

    def __init__(self, real: TextEmbedder) -> None:
        self._real = real
        self._known: dict[str, Vector] = {}
        self.num_texts = 0
        self.seconds = 0.0

    @property
    def name(self) -> str:
        return self._real.name

    @property
    def dimension(self) -> int:
        return self._real.dimension

    @property
    def seconds_per_text(self) -> float:
        """What the embedding of one text took, on average over the batches."""
        return self.seconds / max(1, self.num_texts)

    def prepare(self, requests: Sequence[TokenizedRequest]) -> None:
        """Embed what these requests need and forget the batch before."""
        texts = dict.fromkeys(window for request in requests for window in windows(prompt_text(request)))
        self._known = {text: self._known[text] for text in texts if text in self._known}
        self._embed_new(sorted(texts, key=len))  # texts of one length embedded together are hardly padded

    def embed(self, texts: Sequence[str]) -> Vector:
        self._embed_new(texts)
        return np.stack([self._known[text] for text in texts])

    def of(self, request: TokenizedRequest) -> Vector | None:
        """The unit vector (D,) of a request; None if it has no text."""
        (vector,) = embed_prompts(self, [prompt_text(request)])
        return vector

    def _embed_new(self, texts: Sequence[str]) -> None:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if not new:
            return
        began = time.perf_counter()
        self._known.update(zip(new, self._real.embed(new), strict=True))
        self.seconds += time.perf_counter() - began
        self.num_texts += len(new)


def prompt_text(request: TokenizedRequest) -> PromptText:
    """A request's text as the nominator wants it."""
    return PromptText(request.text, "")


@dataclass(frozen=True, slots=True)
class Workbench:
    """What all arms of a replay are made with."""

    settings: Settings
    bytes_per_token: int
    prefill_tokens_per_s: float
    meanings: Meanings | None = None  # None: no arm may look at meaning
    light_ids: frozenset[int] = field(default_factory=frozenset)  # tokens without a letter or digit
    explain_losses: bool = True  # plan again to tell what KVShare's gates cost; no part of serving


@dataclass(eq=False)
class Arm(ABC):
    """
    One way of caching with one store. `capacity_tokens` None: the store is infinite.

    Arms live in one thread and are closed once. Their keyword-only fields are the options that they take.
    """

    family: ClassVar = ""

    name: str
    bench: Workbench
    capacity_tokens: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What distinguishes this arm from others of its family, for `results.json`."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.kw_only}

    @property
    def label(self) -> str:
        """How results and reports call it."""
        return arm_label(self.name, self.capacity_tokens)

    @abstractmethod
    def observe(self, request: TokenizedRequest) -> Outcome:
        """What of a request would be reused, given all that was observed before; then store it."""

    def describe_tree(self) -> dict[str, Any] | None:
        """Figures of the delta tree, for arms that have one; see results.py."""
        return None

    def close(self) -> None:  # noqa: B027  most arms hold nothing but memory
        """Let go of everything."""


class NothingArm(Arm):
    """No cache at all: what the others are compared with."""

    family = "nothing"

    def observe(self, request: TokenizedRequest) -> Outcome:
        return Outcome()


def stored_tokens(request: TokenizedRequest) -> TokenIds:
    """The tokens whose KV there is once a request was answered: the prompt and what was generated."""
    return token_ids(np.concatenate([request.token_ids, request.answer_ids]))


def with_room(rows: NDArray[T], num_rows: int) -> NDArray[T]:
    """The same array, or one at least twice as long that begins with it and goes on with zeros."""
    if num_rows <= len(rows):
        return rows
    more = max(len(rows), num_rows - len(rows))
    return np.concatenate([rows, np.zeros((more, *rows.shape[1:]), rows.dtype)])
