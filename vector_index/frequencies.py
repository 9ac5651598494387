"""
How common each fingerprint is, so that a search does not walk the postings of the whole namespace.

A system prompt that everybody shares puts its fingerprints into every stored prompt; asking for
them costs time linear in the number of prompts and tells candidates apart not at all. So a search
asks for the rarest fingerprints first, until their postings use up a budget.

The counts live in one fixed table of buckets (4 MB), not in a dictionary: a few bytes instead of
a hundred per fingerprint. Two fingerprints in one bucket only make each other look more common.
"""

import threading

import numpy as np
from numpy.typing import NDArray


class FingerprintFrequencies:
    """Counts of namespace-bound fingerprints (`fingerprints.bind`); safe to use from threads."""

    def __init__(self, num_buckets: int = 1 << 20) -> None:
        self._counts = np.zeros(num_buckets, dtype=np.uint32)
        self._num_added: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, namespace: str, prints: NDArray[np.uint32]) -> None:
        """Count one more prompt with these fingerprints."""
        with self._lock:
            np.add.at(self._counts, prints % len(self._counts), 1)
            self._num_added[namespace] = self._num_added.get(namespace, 0) + 1

    def forget_namespace(self, namespace: str) -> None:
        """Forget how many prompts a namespace had; its buckets stay as a little noise."""
        with self._lock:
            self._num_added.pop(namespace, None)

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts[:] = 0
            self._num_added.clear()

    def rarest(
        self,
        namespace: str,
        prints: NDArray[np.uint32],
        *,
        num_prompts: int,
        max_postings: int,
        min_asked: int,
    ) -> NDArray[np.uint32]:
        """
        The rarest of `prints`, as many as `max_postings` postings allow and at least `min_asked`.

        `num_prompts` is how many prompts the namespace holds now. Forgotten prompts are not
        uncounted (their fingerprints are no longer known); the share of all prompts ever added
        is scaled to the living ones instead.
        """
        with self._lock:
            counts = self._counts[prints % len(self._counts)]
            num_added = self._num_added.get(namespace, 0)
        if num_added == 0 or num_prompts == 0:
            return prints
        shares = np.minimum(counts / num_added, 1.0)
        order = np.argsort(shares, kind="stable")
        postings = np.cumsum(shares[order] * num_prompts)
        num_asked = max(min_asked, int(np.searchsorted(postings, max_postings, side="right")))
        return np.sort(prints[order[:num_asked]])
