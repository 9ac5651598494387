"""
Donors by shared passages: few of them, that together cover as much of the prompt as can be.

The prompts that share most are often alike (they all have the popular document), while the donor
of a rare passage shares little else and stays behind them. So what the hits leave uncovered is
searched for again, and hits are put in the order of a greedy cover.
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vector_index.base import Hit, VectorIndex
from vector_index.frequencies import FingerprintFrequencies
from vector_index.nomination import NominatorSettings

_MAX_SEARCHES = 3


class PassageSearch:
    """
    The search for donors of one prompt's passages: a few searches by fingerprints, each within the
    budget of postings. What was found before one of them fails stays found.

    Shapes:  prints (F,) uint32, sorted
    """

    def __init__(
        self,
        index: VectorIndex,
        frequencies: FingerprintFrequencies,
        settings: NominatorSettings,
        namespace: str,
        prints: NDArray[np.uint32],
    ) -> None:
        self._index = index
        self._frequencies = frequencies
        self._settings = settings
        self._namespace = namespace
        self._prints = prints
        self._counts: dict[int, float] = {}  # per donor, of the prints that it holds
        self._holds = np.zeros((0, len(prints)), dtype=np.bool_)  # (donors, F)

    async def run(self, *, deadline: float) -> None:
        """
        Search until little is left uncovered, at most three times, and not again after the deadline.

        Units:   deadline in seconds of the event loop's clock
        Raises:  IndexUnavailableError as the index does
        """
        left = self._prints
        for _ in range(_MAX_SEARCHES):
            asked = self._frequencies.rarest(
                left,
                max_postings=self._settings.max_postings,
                min_asked=self._settings.min_asked,
                max_asked=self._settings.max_asked,
            )
            limit = self._settings.max_candidates
            found = await self._index.search_fingerprints(self._namespace, asked, limit)
            new = [hit for hit in found if hit.prompt_id not in self._counts]
            self._add(new)
            left, enough = self._prints[~self._holds.any(axis=0)], self._settings.min_asked
            if not new:  # the rare ones led to nobody: the common ones are left to ask for
                left, enough = np.setdiff1d(left, asked, assume_unique=True), 1
            if len(left) < enough or asyncio.get_running_loop().time() >= deadline:
                break

    @property
    def covered(self) -> float:
        """The share of the prints that the donors found so far cover together."""
        together = float(self._holds.any(axis=0).mean())
        return max(together, *(self._share(count) for count in self._counts.values()), 0.0)

    def ranked(self) -> list[Hit]:
        """
        The donors found so far in the order of usefulness: each adds most to those before it.

        Their score is the share of the prints that they hold, 0 to 1.
        """
        found = list(self._counts.items())
        order = _cover_order(self._holds, list(self._counts.values()))
        return [Hit(found[i][0], self._share(found[i][1])) for i in order]

    def _share(self, count: float) -> float:
        return min(1.0, count / len(self._prints))

    def _add(self, hits: Sequence[Hit]) -> None:
        rows = np.zeros((len(hits), len(self._prints)), dtype=np.bool_)
        for row, hit in zip(rows, hits, strict=True):
            held = self._frequencies.held(self._namespace, hit.prompt_id)
            if held is not None:
                # prints are sorted: ten times as quick as np.isin
                places = np.minimum(np.searchsorted(self._prints, held), len(self._prints) - 1)
                row[places[self._prints[places] == held]] = True
            # Of another process's prompt only the index knows how many it shares, and nobody which.
            self._counts[hit.prompt_id] = hit.score if held is None else float(row.sum())
        self._holds = np.concatenate([self._holds, rows])


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
