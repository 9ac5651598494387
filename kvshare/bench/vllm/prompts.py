"""Prompts of the vLLM benchmarks: strangers, and near-duplicates whose first difference is near the top."""

from __future__ import annotations

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare.bench.harness import random_prompt
from kvshare.bench.vllm.models import VOCAB_SIZE

_TOP = 0.01  # of the prompt: where the first edit begins, so that a prefix cache loses nearly all
_JITTER = 0.2  # of the distance between edits: no two recipients are edited at quite the same places


def stranger(rng: np.random.Generator, num_tokens: int) -> TokenIds:
    """A prompt that shares nothing with any other."""
    return random_prompt(rng, num_tokens, VOCAB_SIZE)


def near_duplicate(rng: np.random.Generator, donor: TokenIds, *, changed: float, edits: int) -> TokenIds:
    """`changed` of the donor's tokens replaced in `edits` equal stretches: one near the top, then spread."""
    tokens = np.array(donor)
    length = max(1, round(changed * len(tokens) / edits))
    distance = len(tokens) / edits
    for number in range(edits):
        start = _TOP * len(tokens) + number * distance
        if number:
            start += rng.uniform(-_JITTER, _JITTER) * (distance - length)
        begin = min(int(start), len(tokens) - length)
        tokens[begin : begin + length] = random_prompt(rng, length, VOCAB_SIZE)
    return token_ids(tokens)


def continued(rng: np.random.Generator, head: TokenIds, num_new: int) -> TokenIds:
    """The same prompt with other tokens after it."""
    return token_ids(np.concatenate([head, stranger(rng, num_new)]))
