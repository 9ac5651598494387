"""
How many stored prompts hold each fingerprint, so that no search walks a whole namespace.

A system prompt that everybody shares puts its fingerprints into every prompt. Asking for them would
cost time linear in the number of prompts, so two bounds hold:

- a fingerprint that `max_holders` prompts hold already is not stored with another one: thousands
  of donors of a passage are plenty. When one is forgotten, the next prompt takes its place;
- a search asks for the rarest fingerprints first, until their postings use up a budget.

The counts live in two tables of buckets (8 MB), not in a dictionary: a few bytes instead of a
hundred per fingerprint. The smaller of a fingerprint's two buckets counts; neighbours in a bucket
only make it look more common. What each prompt was counted for is kept, 4 bytes a fingerprint, so
that forgetting the prompt takes back just that.
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
        """Count a prompt, instead of an earlier one of its id; returns those of `prints` it is to hold."""
        self.remove(namespace, prompt_id)
        held = prints[self._num_holders(prints) < self._max_holders]
        for counts, buckets in zip(self._counts, _buckets(held), strict=True):
            np.add.at(counts, buckets, 1)
        self._held.setdefault(namespace, {})[prompt_id] = held.tobytes()
        return held

    def remove(self, namespace: str, prompt_id: int) -> None:
        """Take a prompt out of the counts; unknown ones are ignored."""
        held = self._held.get(namespace, {}).pop(prompt_id, None)
        if held is None:
            return
        if not self._held[namespace]:
            del self._held[namespace]
        for counts, buckets in zip(self._counts, _buckets(np.frombuffer(held, np.uint32)), strict=True):
            np.subtract.at(counts, buckets, 1)

    def held(self, namespace: str, prompt_id: int) -> NDArray[np.uint32] | None:
        """What a prompt was counted for, as it was given; None for one that is not counted."""
        held = self._held.get(namespace, {}).get(prompt_id)
        return None if held is None else np.frombuffer(held, np.uint32)

    def rarest(
        self, prints: NDArray[np.uint32], *, max_postings: int, min_asked: int, max_asked: int
    ) -> NDArray[np.uint32]:
        """
        The rarest of `prints`, as many as `max_postings` postings allow and at least `min_asked`.

        Of more than `max_asked` an even choice, by place among the hashes. Those that nobody holds come in
        only where nobody holds any: then the counts may not know what the index does.
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
        """How many prompts hold each, or a few more."""
        first, second = _buckets(prints)
        holders: NDArray[np.uint32] = np.minimum(self._counts[0, first], self._counts[1, second])
        return holders


def _buckets(prints: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """(F,) fingerprints -> their bucket in each table."""
    low = prints & np.uint32((1 << _BITS) - 1)
    return low, (prints * _FACTOR) >> np.uint32(32 - _BITS)
