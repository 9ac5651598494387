"""
Prompts of the vLLM benchmarks: unrelated ones, near-duplicates, hits of vLLM's prefix cache; and the requests
of a soak: kinds of prompts, modes of sharing, and clients that hang up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare_lab.bench.harness import random_prompt
from kvshare_lab.bench.random_models import DEMO_VOCAB_SIZE

_TOP = 0.01  # share of the prompt before the first edit: a prefix cache can reuse no more
_JITTER = 0.2  # share of the distance between edits, so that no two recipients are edited at the same places

_UNRELATED = "stranger"  # its name in documents
_KINDS = {_UNRELATED: 0.2, "repeat": 0.2, "edited": 0.4, "continued": 0.2}
_MODES = {"off": 0.15, "exact": 0.4, "approx": 0.45}
_ABORT_EARLY, _ABORT_LATE = 0.06, 0.06
_LATEST_ABORT_S, _LATEST_ABORT_TOKEN = 0.4, 30


def unrelated_prompt(rng: np.random.Generator, num_tokens: int) -> TokenIds:
    """A prompt that shares nothing with any other."""
    return random_prompt(rng, num_tokens, DEMO_VOCAB_SIZE)


def near_duplicate(
    rng: np.random.Generator, donor: TokenIds, *, changed: float, edits: int, is_even: bool = False
) -> TokenIds:
    """
    The donor with the share `changed` of its tokens replaced in `edits` equal stretches.

    The first stretch is near the top and the others are spread. `is_even`: each is in the middle of its part
    of the prompt, the first one too.
    """
    tokens = np.array(donor)
    length = max(1, round(changed * len(tokens) / edits))
    distance = len(tokens) / edits
    first = (distance - length) / 2 if is_even else _TOP * len(tokens)
    for number in range(edits):
        start = first + number * distance
        if number or is_even:
            start += rng.uniform(-_JITTER, _JITTER) * (distance - length)
        begin = min(int(start), len(tokens) - length)
        tokens[begin : begin + length] = random_prompt(rng, length, DEMO_VOCAB_SIZE)
    return token_ids(tokens)


def prefix_hit(rng: np.random.Generator, donor: TokenIds, *, num_new: int, block_size: int) -> TokenIds:
    """
    A prompt about as long as the donor, of which a prefix cache that has the donor lacks `num_new` tokens.

    A prefix cache holds whole blocks, so the donor's part ends with a block.
    """
    head = round((len(donor) - num_new) / block_size) * block_size
    return token_ids(np.concatenate([donor[:head], unrelated_prompt(rng, num_new)]))


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One request. `abort_s`: hang up after so long; `abort_after`: after so many tokens."""

    kind: str
    mode: str
    prompt: TokenIds
    abort_s: float | None = None
    abort_after: int | None = None

    @property
    def aborts(self) -> bool:
        return self.abort_s is not None or self.abort_after is not None

    @property
    def shares_nothing(self) -> bool:
        """Whether vLLM computes it as it would without KVShare, whatever is stored."""
        return self.mode == "off" or self.kind == _UNRELATED

    @property
    def may_be_approximate(self) -> bool:
        """Whether KV of other prompts may be copied. An unrelated prompt is always computed in full."""
        return self.mode == "approx" and self.kind != _UNRELATED


class Mixture:
    """Draws requests; all kinds but unrelated prompts derive from the last `max_prompts` that were sent."""

    def __init__(self, rng: np.random.Generator, min_prompt: int, max_prompt: int, max_prompts: int) -> None:
        self._rng, self._min_prompt, self._max_prompt = rng, min_prompt, max_prompt
        self._asked: deque[TokenIds] = deque(maxlen=max_prompts)

    def draw(self) -> Op:
        kind = self._one_of(_KINDS) if self._asked else _UNRELATED
        prompt = self._prompt(kind)
        mode = self._one_of(_MODES)
        drawn = self._rng.random()
        if drawn < _ABORT_EARLY:
            return Op(kind, mode, prompt, abort_s=float(self._rng.uniform(0.005, _LATEST_ABORT_S)))
        if drawn < _ABORT_EARLY + _ABORT_LATE:
            return Op(kind, mode, prompt, abort_after=int(self._rng.integers(1, _LATEST_ABORT_TOKEN)))
        return Op(kind, mode, prompt)

    def remember(self, prompt: TokenIds) -> None:
        self._asked.append(prompt)

    def _prompt(self, kind: str) -> TokenIds:
        if kind == _UNRELATED:
            return unrelated_prompt(
                self._rng, int(self._rng.integers(self._min_prompt, self._max_prompt + 1))
            )
        before = self._asked[int(self._rng.integers(len(self._asked)))]
        if kind == "repeat":
            return before
        if kind == "edited":
            changed, edits = self._rng.uniform(0.02, 0.2), int(self._rng.integers(1, 4))
            return near_duplicate(self._rng, before, changed=changed, edits=edits)
        head = token_ids(before[: int(self._rng.integers(1, len(before) + 1))])
        num_new = int(self._rng.integers(1, self._max_prompt // 2))
        head = head[: 2 * self._max_prompt - num_new - 1]
        return token_ids(np.concatenate([head, unrelated_prompt(self._rng, num_new)]))

    def _one_of(self, shares: dict[str, float]) -> str:
        return str(self._rng.choice(list(shares), p=list(shares.values())))
