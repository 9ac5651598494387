"""
The hashes of all candidates' k-grams, filtered together.

Short prompts are joined into one array, so that a filter is a few numpy calls in all and not a few for each
candidate: for prompts of some hundred tokens the calls cost more than the computation. Long prompts are
filtered one by one, because arrays of megabytes do not fit into the processor's cache.
"""

from collections.abc import Sequence

import numpy as np

from delta_tree.kgrams import Hashes, Ids, Places, Sieve, quick_hashes

_MAX_JOINED = 1 << 16  # tokens


class CandidateKGrams:
    """Hashes of the k-grams of several prompts; no k-gram reaches from one prompt into the next."""

    __slots__ = ("_among", "_bounds", "_hashes", "_joined", "_passing")

    def __init__(self, prompts: Sequence[Ids], k: int) -> None:
        self._passing: list[Places] | None = None  # by prompt, where the prompts are long
        self._among: Places | None = None  # in the joined prompts, where they are short
        if sum(map(len, prompts)) > _MAX_JOINED:
            self._joined: Hashes | None = None
            self._hashes = [quick_hashes(prompt, k) for prompt in prompts]
            return
        self._joined = quick_hashes(np.concatenate([*prompts, np.empty(0, dtype=np.int32)]), k)
        spans: list[tuple[int, int]] = []
        start = 0
        for prompt in prompts:
            spans.append((start, max(start, start + len(prompt) - k + 1)))
            start += len(prompt)
        self._bounds = np.array(spans, dtype=np.int64).reshape(-1, 2)
        self._hashes = [self._joined[start:end] for start, end in spans]

    def hashes(self, number: int) -> Hashes:
        """The hashes of one prompt, equal to its `quick_hashes`."""
        return self._hashes[number]

    def narrow(self, sieve: Sieve) -> list[Places]:
        """
        For each prompt the positions of the k-grams that pass this sieve and all earlier ones.

        The uncovered part of the new prompt only shrinks, so a k-gram that failed once is not tested again.
        """
        if self._joined is None:
            earlier: Sequence[Places | None] = self._passing or [None] * len(self._hashes)
            self._passing = [
                sieve.passing(hashes, among) for hashes, among in zip(self._hashes, earlier, strict=True)
            ]
            return self._passing
        self._among = places = sieve.passing(self._joined, self._among)
        cuts = places.searchsorted(self._bounds).tolist()
        starts = self._bounds[:, 0].tolist()
        return [places[low:high] - start for (low, high), start in zip(cuts, starts, strict=True)]
