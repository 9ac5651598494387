"""
Counts how many stored prompts hold each fingerprint, so that no search reads a whole namespace.

The fingerprints of a common system prompt are in every prompt. A search for them would take time linear in
the number of prompts, so there are two limits:

- once `max_holders` prompts hold a fingerprint, it is not stored with further prompts: thousands of donors of
  a passage are enough. When one of them is forgotten, the next new prompt takes its place;
- a search queries the rarest fingerprints first, up to a budget of postings.

The counts are in two hash tables (8 MB): a few bytes per fingerprint, where a dictionary takes a hundred. The
smaller of a fingerprint's two buckets is its count; other fingerprints in a bucket can only make it too high.
The fingerprints counted for each prompt are stored, too (4 bytes each), so that `remove` subtracts them.
"""

import numpy as np
from numpy.typing import NDArray

_BITS = 20
_FACTOR = np.uint32(0x9E3779B1)  # odd: spreads the second table's buckets by the high bits


class FingerprintFrequencies:
    """Counts of namespace-bound fingerprints (`fingerprints.bind`). Used from one thread."""

    def __init__(self, *, max_holders: int) -> None:
        if max_holders < 1:
            raise ValueError(f"max_holders {max_holders} must be >= 1")
        self._max_holders = max_holders
        self._counts = np.zeros((2, 1 << _BITS), dtype=np.uint32)
        self._held: dict[str, dict[int, bytes]] = {}

    def add(self, namespace: str, prompt_id: int, prints: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Count a prompt, replacing one with its id; returns those of `prints` to store with it."""
        self.remove(namespace, prompt_id)
        held = prints[self._num_holders(prints) < self._max_holders]
        for counts, buckets in zip(self._counts, _buckets(held), strict=True):
            np.add.at(counts, buckets, 1)
        self._held.setdefault(namespace, {})[prompt_id] = held.tobytes()
        return held

    def remove(self, namespace: str, prompt_id: int) -> None:
        """Subtract a prompt from the counts; unknown ones are ignored."""
        held = self._held.get(namespace, {}).pop(prompt_id, None)
        if held is None:
            return
        if not self._held[namespace]:
            del self._held[namespace]
        for counts, buckets in zip(self._counts, _buckets(np.frombuffer(held, np.uint32)), strict=True):
            np.subtract.at(counts, buckets, 1)

    def held(self, namespace: str, prompt_id: int) -> NDArray[np.uint32] | None:
        """The fingerprints that `add` returned for a prompt; None for an unknown prompt."""
        held = self._held.get(namespace, {}).get(prompt_id)
        return None if held is None else np.frombuffer(held, np.uint32)

    def rarest(
        self, prints: NDArray[np.uint32], *, max_postings: int, min_asked: int, max_asked: int
    ) -> NDArray[np.uint32]:
        """
        The rarest of `prints`, as many as `max_postings` postings allow and at least `min_asked`.

        Of more than `max_asked`, those that no prompt holds are left out, and then every n-th is taken in the
        order of the hashes. If no prompt holds any, all stay: the index may have prompts of other processes.
        """
        counts = self._num_holders(prints)
        if len(prints) > max_asked and (is_held := counts > 0).any():
            prints, counts = prints[is_held], counts[is_held]
        order = np.argsort(counts, kind="stable")
        postings = np.cumsum(counts[order], dtype=np.int64)
        num_asked = max(min_asked, int(np.searchsorted(postings, max_postings, side="right")))
        asked = np.sort(prints[order[:num_asked]])
        if len(asked) <= max_asked:
            return asked
        chosen: NDArray[np.uint32] = asked[np.arange(max_asked) * len(asked) // max_asked]
        return chosen

    def _num_holders(self, prints: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """How many prompts hold each fingerprint; the result may be too high, never too low."""
        first, second = _buckets(prints)
        holders: NDArray[np.uint32] = np.minimum(self._counts[0, first], self._counts[1, second])
        return holders


def _buckets(prints: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """(F,) fingerprints -> their bucket in each table."""
    low = prints & np.uint32((1 << _BITS) - 1)
    return low, (prints * _FACTOR) >> np.uint32(32 - _BITS)
