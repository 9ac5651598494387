"""
Donors by shared passages: few of them, that together cover as much of the prompt as can be.

The prompts that share most are often alike (they all have the popular document), while the donor
of a rare passage shares little else and stays behind them. So what the hits leave uncovered is
searched for again, and hits are put in the order of a greedy cover.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from vector_index.base import Hit, VectorIndex
from vector_index.frequencies import FingerprintFrequencies
from vector_index.nomination import NominatorSettings

_MAX_SEARCHES = 3


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
    """A few searches by fingerprints, each within the budget of postings."""

    def __init__(
        self,
        index: VectorIndex,
        frequencies: FingerprintFrequencies,
        settings: NominatorSettings,
    ) -> None:
        self._index = index
        self._frequencies = frequencies
        self._settings = settings

    async def collect(self, namespace: str, prints: NDArray[np.uint32], hits: list[Hit]) -> NDArray[np.bool_]:
        """
        Add donors of these sorted fingerprints to `hits`, search by search.

        Returns which of the hits then in the list holds which fingerprint.
        Shapes:  prints (F,) -> (H, F)

        Raises:  IndexUnavailableError as the index does; earlier searches' hits stay in the list
        """
        left = prints
        holds = _holdings(prints, hits)
        for _ in range(_MAX_SEARCHES):
            asked = self._frequencies.rarest(
                left,
                max_postings=self._settings.max_postings,
                min_asked=self._settings.min_asked,
                max_asked=self._settings.max_asked,
            )
            limit = self._settings.max_candidates
            found = await self._index.search_fingerprints(namespace, asked, limit, with_fingerprints=False)
            known = {hit.prompt_id for hit in hits}
            new = [self._with_fingerprints(namespace, hit) for hit in found if hit.prompt_id not in known]
            hits += new
            holds = np.concatenate([holds, _holdings(prints, new)])
            left, enough = prints[~holds.any(axis=0)], self._settings.min_asked
            if not new:  # the rare ones led to nobody: the common ones are left to ask for
                left, enough = np.setdiff1d(left, asked, assume_unique=True), 1
            if len(left) < enough:
                break
        return holds

    def _with_fingerprints(self, namespace: str, hit: Hit) -> Hit:
        """The hit with what is stored of its prompt; as it is, where this process does not know that."""
        held = self._frequencies.held(namespace, hit.prompt_id)
        return hit if held is None else replace(hit, fingerprints=held)


def rank_passages(
    prints: NDArray[np.uint32], hits: Sequence[Hit], holds: NDArray[np.bool_] | None = None
) -> Passages:
    """
    Donors in the order of usefulness: each adds most to those before it.

    `holds` as `collect` returns it; None where it did not come to an end.
    """
    if not hits:
        return Passages()
    if holds is None:
        holds = _holdings(prints, hits)
    # A backend that does not tell a hit's fingerprints still tells how many were shared.
    counts = [
        hit.score if hit.fingerprints is None else float(held.sum())
        for hit, held in zip(hits, holds, strict=True)
    ]
    donors = [
        PassageHit(hit.prompt_id, share=min(1.0, count / len(prints)))
        for hit, count in zip(hits, counts, strict=True)
    ]
    together = float(holds.any(axis=0).mean())
    return Passages(
        hits=tuple(donors[i] for i in _cover_order(holds, counts)),
        covered=max([together, *(donor.share for donor in donors)]),
    )


def _holdings(prints: NDArray[np.uint32], hits: Sequence[Hit]) -> NDArray[np.bool_]:
    """(H, F): which hit holds which fingerprint; none where the backend does not tell."""
    holds = np.zeros((len(hits), len(prints)), dtype=np.bool_)
    for row, hit in zip(holds, hits, strict=True):
        if hit.fingerprints is not None:
            # prints are sorted: ten times as quick as np.isin
            places = np.minimum(np.searchsorted(prints, hit.fingerprints), len(prints) - 1)
            row[places[prints[places] == hit.fingerprints]] = True
    return holds


def _cover_order(holds: NDArray[np.bool_], counts: Sequence[float]) -> list[int]:
    """Greedy set cover; those that add nothing follow by what they share."""
    rest = sorted(range(len(counts)), key=lambda i: -counts[i])
    uncovered = np.ones(holds.shape[1], dtype=np.bool_)
    order = []
    while rest:
        gains = holds[rest][:, uncovered].sum(axis=1)
        best = int(gains.argmax())  # the first of equals: the one that shares most
        if gains[best] == 0:
            break
        uncovered &= ~holds[rest[best]]
        order.append(rest.pop(best))
    return order + rest
