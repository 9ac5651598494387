"""Prompts of real text, for benchmarks on a real model: the example text, then forms, all our own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from delta_tree import TokenIds, token_ids
from kvshare.chat_model import EXAMPLE_TEXT
from kvshare.demo.pairs import near_duplicate_pairs
from kvshare.engines.embedded.tokenizer import PromptEncoder
from kvshare.requests import Prompt

_MAX_FORMS = 64


class RealText:
    """Running text in one tokenizer's ids: one prompt, and other stretches to put into it."""

    def __init__(self, encoder: PromptEncoder, *, num_tokens: int) -> None:
        """Raises ValueError for more tokens than the text has."""
        example = encoder.encode_text(EXAMPLE_TEXT.read_text(encoding="utf-8"))
        forms = [_form(encoder, number).token_ids for number in range(_MAX_FORMS)]
        text: NDArray[np.int32] = np.concatenate([example.token_ids, *forms])
        if len(text) < 2 * num_tokens:
            raise ValueError(
                f"prompts of real text have at most {len(text) // 2:,} tokens, got {num_tokens:,}"
            )
        self.prompt: TokenIds = token_ids(text[:num_tokens])
        self._others = text[num_tokens:]

    def draw(self, rng: np.random.Generator, num_tokens: int) -> TokenIds:
        """A stretch of text that is not in the prompt."""
        start = int(rng.integers(len(self._others) - num_tokens + 1))
        return token_ids(self._others[start : start + num_tokens])


def _form(encoder: PromptEncoder, number: int) -> Prompt:
    pair = next(near_duplicate_pairs(seed=number, count=1))
    return encoder.encode_text("\n\n" + pair.donor_messages[-1]["content"])
