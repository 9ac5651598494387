"""
The k-grams of all candidates side by side, so that each question to them is a few array operations, not a
few for each: beside prompts of some hundred tokens the calls cost more than what they compute.
"""

from collections.abc import Sequence

import numpy as np

from delta_tree.kgrams import Hashes, Ids, Places, Sieve, quick_hashes


class Crowd:
    """Hashes of the k-grams within each of some prompts; none reaches from one into the next."""

    __slots__ = ("_among", "_bounds", "_hashes", "_spans")

    def __init__(self, prompts: Sequence[Ids], k: int) -> None:
        joined = np.concatenate([*prompts, np.empty(0, dtype=np.int32)])
        self._hashes = quick_hashes(joined, k)
        self._among: Places | None = None
        self._spans: list[tuple[int, int]] = []
        start = 0
        for prompt in prompts:
            self._spans.append((start, max(start, start + len(prompt) - k + 1)))
            start += len(prompt)
        self._bounds = np.array(self._spans, dtype=np.int64).ravel()

    def hashes(self, number: int) -> Hashes:
        """Those of one prompt: as `quick_hashes` gives them."""
        start, end = self._spans[number]
        return self._hashes[start:end]

    def narrow(self, sieve: Sieve) -> list[Places]:
        """
        For each prompt the places whose k-grams the sieve lets pass, and earlier sieves did.

        What is asked about only shrinks, so places that are out stay out.
        """
        self._among = places = sieve.passing(self._hashes, self._among)
        cuts = places.searchsorted(self._bounds).tolist()
        return [
            places[low:high] - start
            for low, high, (start, _) in zip(cuts[::2], cuts[1::2], self._spans, strict=True)
        ]
