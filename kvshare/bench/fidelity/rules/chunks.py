"""
What Cache-Craft (SIGMOD'25) records of a chunk when it is computed, and what it concludes from that.

Equation numbers are the paper's; attention is the mean over layers and heads.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvshare.bench.fidelity.scenario import Prompt
from kvshare.sharing.selection import Scores

LEAST_MISMATCH = 1e-6  # of 1 - beta': at 100 % every token is computed, whatever stood before it


@dataclass(frozen=True, slots=True)
class Variant:
    """A chunk as one stored prompt computed it."""

    tokens: bytes
    prefix: tuple[bytes, ...]  # the chunks before it, in order
    inter: Scores  # (number of chunks before,) attention to each of them, summed over the chunk's tokens
    impact: float  # CCI, eq. 11
    token_scores: Scores  # (|C|,) attention of each token to all chunks before (eq. 14)


def variant(prompt: Prompt, to_parts: Scores, itself: Scores, part: int) -> Variant:
    """
    What is recorded of a chunk when it is computed (eq. 3, 4, 9 to 11).

    Shapes:  to_parts (T, P) attention of each token to each chunk, itself (T,) to itself
    """
    spans = prompt.parts
    rows = slice(spans[part].start, spans[part].end)
    inter = to_parts[rows, :part].sum(axis=0)
    length = len(spans[part])
    intra = float(to_parts[rows, part].sum() - itself[rows].sum())
    outside = sum(value / (length * len(spans[j])) for j, value in enumerate(inter))
    inside = intra / length**2
    impact = 1.0 if inside <= 0 else 1 / (1 + math.exp(-min(outside / inside, 50.0)))
    return Variant(
        tokens=content(prompt, part),
        prefix=tuple(content(prompt, before) for before in range(part)),
        inter=inter,
        impact=impact,
        token_scores=to_parts[rows, :part].sum(axis=1),
    )


def prefix_overlap(stored: Variant, prefix: Sequence[bytes]) -> float:
    """beta' of a stored chunk behind these chunks (eq. 6 to 8)."""
    if not stored.prefix:
        return 1.0 if not prefix else 0.0
    total = float(stored.inter.sum())
    common = [number for number, chunk in enumerate(stored.prefix) if chunk in prefix]
    beta = float(stored.inter[common].sum()) / total if total > 0 else 0.0
    order = [list(prefix).index(stored.prefix[number]) for number in common]
    pairs = list(itertools.combinations(order, 2))
    discordant = sum(first > second for first, second in pairs)
    return beta * (1 - (discordant / len(pairs) if pairs else 0.0))


def fix_overhead(stored: Variant, prefix: Sequence[bytes]) -> float:
    """CFO without alpha: CCI x (1 - beta') (eq. 12)."""
    return stored.impact * max(LEAST_MISMATCH, 1 - prefix_overlap(stored, prefix))


@dataclass(slots=True)
class ChunkStore:
    """
    At most `capacity` variants over all chunks; the least reusable leaves (section 3.3).

    A variant's reusability grows by 1 / CFO with every use.
    """

    capacity: int
    _variants: dict[int, Variant] = field(default_factory=dict)
    _reusability: dict[int, float] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def add(self, variant: Variant) -> int:
        """Its number; evicts if there is no room."""
        if len(self._variants) >= self.capacity:
            out = min(self._variants, key=lambda number: (self._reusability[number], number))
            del self._variants[out], self._reusability[out]
        number = next(self._numbers)
        self._variants[number], self._reusability[number] = variant, 0.0
        return number

    def best(self, tokens: bytes, prefix: Sequence[bytes]) -> int | None:
        """The chunk's variant that needs least fixing behind this prefix; None if it is not stored."""
        costs = {
            number: fix_overhead(stored, prefix)
            for number, stored in self._variants.items()
            if stored.tokens == tokens
        }
        if not costs:
            return None
        number = min(costs, key=lambda candidate: (costs[candidate], candidate))
        self._reusability[number] += 1 / costs[number]
        return number

    def __getitem__(self, number: int) -> Variant:
        return self._variants[number]

    def __contains__(self, number: int) -> bool:
        return number in self._variants


def content(prompt: Prompt, part: int) -> bytes:
    return prompt.token_ids[prompt.parts[part].start : prompt.parts[part].end].tobytes()


def focused_chunks(attention: Scores, *, confidence: int) -> tuple[frozenset[int], int]:
    """
    Algorithm 1: the chunks that the question looks at, and the layer behind which that is settled.

    Shapes:  attention (L, k) of the question to each chunk, by layer
    """
    num_layers, num_chunks = attention.shape
    everything = frozenset(range(num_chunks))
    if num_chunks < 3:
        return everything, num_layers
    found: list[frozenset[int]] = []
    for layer, sums in enumerate(np.cumsum(attention, axis=0), start=1):
        order = np.argsort(-sums, kind="stable")
        gaps = -np.diff(sums[order])
        shares = gaps / max(float(gaps.sum()), 1e-12)
        entropy = np.cumsum(-shares * np.log(np.maximum(shares, 1e-12)))
        number = int(np.argmax(np.diff(entropy))) + 1
        found.append(frozenset(order[:number].tolist()))
        if layer >= confidence and len(set(found[-confidence:])) == 1:
            return found[-1], layer
    return everything, num_layers
