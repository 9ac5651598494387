"""
Donors by shared passages: few of them, that together cover as much of the prompt as can be.

The prompts that share most are often alike (they all have the popular document), while the donor
of a rare passage shares little else and stays behind them. So what the first hits leave uncovered
is searched for once more, and hits are put in the order of a greedy cover.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vector_index.base import Hit, VectorIndex
from vector_index.frequencies import FingerprintFrequencies
from vector_index.nomination import NominatorSettings
from vector_index.prefix_table import PrefixTable


@dataclass(frozen=True, slots=True)
class PassageHit:
    """`share` says how much of the searched part of the prompt this donor has, 0 to 1."""

    prompt_id: int
    share: float


@dataclass(frozen=True, slots=True)
class Passages:
    """Donors, most useful first, and the share of the searched part they cover together."""

    hits: tuple[PassageHit, ...] = ()
    covered: float = 0.0


class PassageSearch:
    """Two searches by fingerprints at most, each within the budget of postings."""

    def __init__(
        self,
        index: VectorIndex,
        prefix_table: PrefixTable,
        frequencies: FingerprintFrequencies,
        settings: NominatorSettings,
    ) -> None:
        self._index = index
        self._prefix_table = prefix_table
        self._frequencies = frequencies
        self._settings = settings

    async def find(self, namespace: str, prints: NDArray[np.uint32]) -> Passages:
        """
        Donors of these sorted fingerprints, most useful first: each adds most to those before.

        Raises:  IndexUnavailableError as the index does
        """
        if not len(prints):
            return Passages()
        hits, expected = await self._search(namespace, prints)
        holds = _holdings(hits, prints)
        left = prints[~holds.any(axis=0)]
        if hits and len(left) >= self._settings.min_asked:
            more, _ = await self._search(namespace, left)
            known = {hit.prompt_id for hit in hits}
            more = [hit for hit in more if hit.prompt_id not in known]
            hits = [*hits, *more]
            holds = np.concatenate([holds, _holdings(more, prints)])
        shares = [
            (held.sum() if hit.fingerprints is not None else hit.score + expected) / len(prints)
            for hit, held in zip(hits, holds, strict=True)
        ]
        found = [
            PassageHit(hit.prompt_id, min(1.0, float(share)))
            for hit, share in zip(hits, shares, strict=True)
        ]
        together = float(holds.any(axis=0).mean())
        return Passages(
            hits=tuple(found[i] for i in _cover_order(holds, shares)),
            covered=max([together, *(hit.share for hit in found)]),
        )

    async def _search(self, namespace: str, prints: NDArray[np.uint32]) -> tuple[list[Hit], float]:
        """Hits, and how many of the fingerprints not asked for each is expected to have."""
        chosen = self._frequencies.select(
            namespace,
            prints,
            num_prompts=self._prefix_table.num_prompts(namespace),
            max_postings=self._settings.max_postings,
            min_asked=self._settings.min_asked,
        )
        limit = self._settings.max_candidates
        hits = await self._index.search_fingerprints(namespace, chosen.asked, limit)
        return hits, chosen.expected_unasked


def _holdings(hits: Sequence[Hit], prints: NDArray[np.uint32]) -> NDArray[np.bool_]:
    """(H, F): which hit holds which fingerprint; none where the backend does not tell."""
    holds = np.zeros((len(hits), len(prints)), dtype=np.bool_)
    for row, hit in zip(holds, hits, strict=True):
        if hit.fingerprints is not None:
            # prints are sorted: ten times as quick as np.isin
            places = np.minimum(np.searchsorted(prints, hit.fingerprints), len(prints) - 1)
            row[places[prints[places] == hit.fingerprints]] = True
    return holds


def _cover_order(holds: NDArray[np.bool_], shares: Sequence[float]) -> list[int]:
    """Greedy set cover; those that add nothing follow by their share."""
    rest = sorted(range(len(shares)), key=lambda i: -shares[i])
    uncovered = np.ones(holds.shape[1], dtype=np.bool_)
    order = []
    while rest:
        gains = holds[rest][:, uncovered].sum(axis=1)
        best = int(gains.argmax())  # the first of equals: the one with the largest share
        if gains[best] == 0:
            break
        uncovered &= ~holds[rest[best]]
        order.append(rest.pop(best))
    return order + rest
