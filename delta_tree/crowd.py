"""
The k-grams of all candidates side by side, so that each question to them is a few array operations, not a
few for each: beside prompts of some hundred tokens the calls cost more than what they compute.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from delta_tree.runs import Hashes, Ids, Sieve, kgram_hashes

Places = npt.NDArray[np.int64]
"""Ascending positions of k-grams in one candidate."""


class Crowd:
    """Hashes of the k-grams within each of some prompts; none reaches from one into the next."""

    __slots__ = ("_bounds", "_hashes", "_spans")

    def __init__(self, prompts: Sequence[Ids], k: int) -> None:
        joined = np.concatenate([*prompts, np.empty(0, dtype=np.int32)])
        self._hashes = kgram_hashes(joined, k)
        self._spans: list[tuple[int, int]] = []
        start = 0
        for prompt in prompts:
            self._spans.append((start, max(start, start + len(prompt) - k + 1)))
            start += len(prompt)
        self._bounds = np.array(self._spans, dtype=np.int64).ravel()

    def hashes(self, number: int) -> Hashes:
        """Those of one prompt: as `kgram_hashes` gives them."""
        start, end = self._spans[number]
        return self._hashes[start:end]

    def passing(self, sieve: Sieve) -> list[Places]:
        """For each prompt the places whose k-grams the sieve lets pass."""
        places = sieve.passing(self._hashes)
        cuts = places.searchsorted(self._bounds).tolist()
        return [
            places[low:high] - start
            for low, high, (start, _) in zip(cuts[::2], cuts[1::2], self._spans, strict=True)
        ]
