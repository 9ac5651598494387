"""
The requests' embeddings, made once for all arms, a batch of requests at a time.

Stands in for the embedder wherever an arm asks for one: what was prepared costs nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvshare.replay.requests import TokenizedRequest
from vector_index import PromptText, TextEmbedder, embed_prompts, windows

Vector = NDArray[np.float32]


class Meanings(TextEmbedder):
    """
    An embedder that remembers the vectors of the batch at hand.

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
        texts = list(dict.fromkeys(w for request in requests for w in windows(prompt_text(request))))
        texts.sort(key=len)  # texts of one length embedded together are hardly padded
        known = {text: self._known[text] for text in texts if text in self._known}
        new = [text for text in texts if text not in known]
        self._known = known
        self._embed_new(new)

    def embed(self, texts: Sequence[str]) -> Vector:
        self._embed_new([text for text in dict.fromkeys(texts) if text not in self._known])
        return np.stack([self._known[text] for text in texts])

    def of(self, request: TokenizedRequest) -> Vector | None:
        """The unit vector (D,) of a request; None if it has no text."""
        (vector,) = embed_prompts(self, [prompt_text(request)])
        return vector

    def _embed_new(self, texts: list[str]) -> None:
        if not texts:
            return
        began = time.perf_counter()
        self._known.update(zip(texts, self._real.embed(texts), strict=True))
        self.seconds += time.perf_counter() - began
        self.num_texts += len(texts)


def prompt_text(request: TokenizedRequest) -> PromptText:
    """A request's text as the nominator wants it."""
    return PromptText(request.text, "")
