"""
Prompts of the vLLM benchmarks: strangers, near-duplicates, prompts of which stock vLLM's prefix cache has a
part, and what a soak asks: kinds of prompts, modes of sharing, and clients that lose patience.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from delta_tree import TokenIds, token_ids
from kvshare.bench.harness import random_prompt
from kvshare.bench.random_models import DEMO_VOCAB_SIZE

_TOP = 0.01  # of the prompt: where the first edit begins, so that a prefix cache loses nearly all
_JITTER = 0.2  # of the distance between edits: no two recipients are edited at quite the same places

_KINDS = {"stranger": 0.2, "repeat": 0.2, "edited": 0.4, "continued": 0.2}
_MODES = {"off": 0.15, "exact": 0.4, "approx": 0.45}
_ABORT_EARLY, _ABORT_LATE = 0.06, 0.06
_LONGEST_PATIENCE_S = 0.4
_LONGEST_LISTENING = 30  # tokens


def stranger(rng: np.random.Generator, num_tokens: int) -> TokenIds:
    """A prompt that shares nothing with any other."""
    return random_prompt(rng, num_tokens, DEMO_VOCAB_SIZE)


def near_duplicate(
    rng: np.random.Generator, donor: TokenIds, *, changed: float, edits: int, is_even: bool = False
) -> TokenIds:
    """
    `changed` of the donor's tokens replaced in `edits` equal stretches: one near the top, then spread.

    `is_even`: each in the middle of its part of the prompt, the first one too.
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
    A prompt about as long as the donor, of which a prefix cache with the donor has all but `num_new` tokens.

    A prefix cache holds whole blocks: the donor is cut at one, and what is to be computed follows.
    """
    head = round((len(donor) - num_new) / block_size) * block_size
    return token_ids(np.concatenate([donor[:head], stranger(rng, num_new)]))


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
    def may_be_approximate(self) -> bool:
        """A stranger has no relatives: whatever the mode, it must be computed as ever."""
        return self.mode == "approx" and self.kind != "stranger"


class Mixture:
    """Draws operations over what was asked before."""

    def __init__(
        self, rng: np.random.Generator, *, min_prompt: int, max_prompt: int, max_prompts: int
    ) -> None:
        self._rng = rng
        self._min_prompt = min_prompt
        self._max_prompt = max_prompt
        self._asked: deque[TokenIds] = deque(maxlen=max_prompts)

    def draw(self) -> Op:
        kind = self._one_of(_KINDS) if self._asked else "stranger"
        prompt = self._prompt(kind)
        mode = self._one_of(_MODES)
        fate = self._rng.random()
        if fate < _ABORT_EARLY:
            return Op(kind, mode, prompt, abort_s=float(self._rng.uniform(0.005, _LONGEST_PATIENCE_S)))
        if fate < _ABORT_EARLY + _ABORT_LATE:
            return Op(kind, mode, prompt, abort_after=int(self._rng.integers(1, _LONGEST_LISTENING)))
        return Op(kind, mode, prompt)

    def remember(self, prompt: TokenIds) -> None:
        self._asked.append(prompt)

    def _prompt(self, kind: str) -> TokenIds:
        if kind == "stranger":
            return stranger(self._rng, int(self._rng.integers(self._min_prompt, self._max_prompt + 1)))
        before = self._asked[int(self._rng.integers(len(self._asked)))]
        if kind == "repeat":
            return before
        if kind == "edited":
            changed, edits = self._rng.uniform(0.02, 0.2), int(self._rng.integers(1, 4))
            return near_duplicate(self._rng, before, changed=changed, edits=edits)
        head = token_ids(before[: int(self._rng.integers(1, len(before) + 1))])
        num_new = int(self._rng.integers(1, self._max_prompt // 2))
        head = head[: 2 * self._max_prompt - num_new - 1]
        return token_ids(np.concatenate([head, stranger(self._rng, num_new)]))

    def _one_of(self, shares: dict[str, float]) -> str:
        names = list(shares)
        return names[int(self._rng.choice(len(names), p=list(shares.values())))]
