"""
Token fingerprints by winnowing: a few hundred numbers that identify a prompt's passages.

Every k-gram of token ids is hashed, and the minimum of each window of w consecutive hashes is a fingerprint.
Two prompts that share a passage share its windows, and so their minima. Only equal tokens count, at any
position: this finds templates, retrieved chunks and shifted chats. `FingerprintFrequencies` counts how many
prompts have each. This file knows no backend.
"""

import hashlib
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

# Odd 64-bit constants (splitmix64, murmur3). They must never change: the hashes are stored on disk.
_TOKEN_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BASE = np.uint64(0xBF58476D1CE4E5B9)
_FINAL_FACTOR = np.uint64(0xFF51AFD7ED558CCD)
_HALF = np.uint64(32)

_BITS = 20  # of the numbers of buckets of `FingerprintFrequencies`
_MOST_COUNTED = np.uint32(0xFFFF)  # of two fingerprints with more holders any may be the rarer one
_SPREAD = np.uint32(0x9E3779B1)  # odd: spreads the second table's buckets by the high bits


def fingerprints(
    token_ids: NDArray[np.int32], *, kgram: int, window: int, max_fingerprints: int | None = None
) -> NDArray[np.uint32]:
    """
    Return the winnowed fingerprints of a prompt, sorted and unique; the same in every process.

    Any two prompts with a common stretch of at least `kgram + window - 1` tokens share at least
    one fingerprint. There are about `2 / (window + 1)` fingerprints per token.

    Shapes:  token_ids (T,) -> (F,) uint32; empty below kgram tokens, at least one from there on
    Limit:   of more than `max_fingerprints` the smallest hashes are taken, by the same rule in every
             prompt; then a common stretch is found only with some probability
    Raises:  ValueError if kgram, window or max_fingerprints is below 1
    Source:  Schleimer, Wilkerson, Aiken: Winnowing, SIGMOD 2003
    """
    if kgram < 1 or window < 1 or (max_fingerprints is not None and max_fingerprints < 1):
        raise ValueError(
            f"kgram {kgram}, window {window} and max_fingerprints {max_fingerprints} must be >= 1"
        )
    if len(token_ids) < kgram:
        return np.empty(0, dtype=np.uint32)
    hashes = _kgram_hashes(np.asarray(token_ids), kgram)
    minima = _sliding_minima(hashes, min(window, len(hashes)))
    # Neighbouring windows mostly have the same minimum: without repeats only a fifth is left to sort.
    return _without_repeats(np.sort(_without_repeats(minima)))[:max_fingerprints]


def bind(prints: NDArray[np.uint32], namespace: str) -> NDArray[np.uint32]:
    """
    Return the same fingerprints, mapped by a bijection that differs per namespace, sorted.

    Without it a passage in many namespaces (a public system prompt) would have one posting list for all of
    them, and a search in one namespace would read the postings of all.
    """
    digest = hashlib.blake2b(namespace.encode(), digest_size=4, person=b"kvshare.prints").digest()
    return np.sort(prints ^ np.uint32(int.from_bytes(digest, "little")))


class FingerprintFrequencies:
    """
    Counts how many stored prompts hold each namespace-bound fingerprint, so that no search reads a whole
    namespace. Used from one thread.

    The fingerprints of a common system prompt are in every prompt. A search for them would take time linear
    in the number of prompts, so there are two limits:

    - once `max_holders` prompts hold a fingerprint, it is not stored with further prompts: thousands of
      donors of a passage are enough. When one of them is forgotten, the next new prompt takes its place;
    - a search queries the rarest fingerprints first, up to a budget of postings.

    The counts are in two hash tables (8 MB): a few bytes per fingerprint, where a dictionary takes a hundred.
    The smaller of a fingerprint's two buckets is its count; other fingerprints in a bucket can only make it
    too high. The fingerprints counted for each prompt are stored, too (4 bytes each), for `remove`.
    """

    def __init__(self, *, max_holders: int) -> None:
        if max_holders < 1:
            raise ValueError(f"max_holders {max_holders} must be >= 1")
        self._max_holders = max_holders
        self._counts = np.zeros((2, 1 << _BITS), dtype=np.uint32)
        self._held: defaultdict[str, dict[int, bytes]] = defaultdict(dict)  # by namespace and prompt

    def add(self, namespace: str, prompt_id: int, prints: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Count a prompt, replacing one with its id; returns those of `prints` to store with it."""
        self.remove(namespace, prompt_id)
        held = prints[self._num_holders(prints) < self._max_holders]
        for counts, buckets in zip(self._counts, _buckets(held), strict=True):
            np.add.at(counts, buckets, 1)
        self._held[namespace][prompt_id] = held.tobytes()
        return held

    def remove(self, namespace: str, prompt_id: int) -> None:
        """Subtract a prompt from the counts; unknown ones are ignored."""
        of_namespace = self._held.get(namespace, {})
        held = np.frombuffer(of_namespace.pop(prompt_id, b""), np.uint32)
        if not of_namespace:
            self._held.pop(namespace, None)
        for counts, buckets in zip(self._counts, _buckets(held), strict=True):
            np.subtract.at(counts, buckets, 1)

    def held(self, namespace: str, prompt_id: int) -> NDArray[np.uint32] | None:
        """Return the fingerprints that `add` returned for a prompt; None for an unknown prompt."""
        held = self._held.get(namespace, {}).get(prompt_id)
        return None if held is None else np.frombuffer(held, np.uint32)

    def are_held(self, prints: NDArray[np.uint32]) -> NDArray[np.bool_]:
        """(F,) whether a prompt may hold a fingerprint; of the others it is certain that none does."""
        return self._num_holders(prints) > 0

    def rarest(
        self, prints: NDArray[np.uint32], *, max_postings: int, min_asked: int, max_asked: int
    ) -> NDArray[np.uint32]:
        """
        Return the rarest of `prints`, as many as `max_postings` postings allow and at least `min_asked`.

        Of more than `max_asked`, those that no prompt holds are left out, and then every n-th is taken in the
        order of the hashes. If no prompt holds any, all stay: the index may have prompts of other processes.
        """
        counts = self._num_holders(prints)
        if len(prints) > max_asked and (is_held := counts > 0).any():
            prints, counts = prints[is_held], counts[is_held]
        # Numbers of 16 bits are sorted in a tenth of the time.
        order = np.argsort(np.minimum(counts, _MOST_COUNTED).astype(np.uint16), kind="stable")
        postings = np.cumsum(counts[order], dtype=np.int64)
        num_asked = max(min_asked, int(np.searchsorted(postings, max_postings, side="right")))
        asked = np.sort(prints[order[:num_asked]])
        if len(asked) <= max_asked:
            return asked
        chosen: NDArray[np.uint32] = asked[np.arange(max_asked) * len(asked) // max_asked]
        return chosen

    def _num_holders(self, prints: NDArray[np.uint32]) -> NDArray[np.uint32]:
        """Return how many prompts hold each fingerprint; the result may be too high, never too low."""
        first, second = _buckets(prints)
        holders: NDArray[np.uint32] = np.minimum(self._counts[0, first], self._counts[1, second])
        return holders


def _kgram_hashes(token_ids: NDArray[np.int32], kgram: int) -> NDArray[np.uint32]:
    """Return the hashes, (T - kgram + 1,), of the k-grams that start at each of the token ids (T,)."""
    mixed = (token_ids.astype(np.uint64) + np.uint64(1)) * _TOKEN_FACTOR
    mixed ^= mixed >> _HALF
    num_grams = len(mixed) - kgram + 1
    hashes = mixed[:num_grams].copy()
    for offset in range(1, kgram):  # Horner's rule, all positions at once; wraps modulo 2**64
        hashes *= _BASE
        hashes += mixed[offset : offset + num_grams]
    # The low bits of a polynomial hash are weak; after one multiply-xor round the minimum is uniform.
    hashes ^= hashes >> _HALF
    hashes *= _FINAL_FACTOR
    return (hashes >> _HALF).astype(np.uint32)


def _sliding_minima(hashes: NDArray[np.uint32], window: int) -> NDArray[np.uint32]:
    """Return the minimum of every window, (H,) -> (H - window + 1,), in log2(window) steps."""
    minima = hashes
    width = 1
    while width * 2 <= window:
        minima = np.minimum(minima[:-width], minima[width:])
        width *= 2
    rest = window - width
    return np.minimum(minima[:-rest], minima[rest:]) if rest else minima


def _without_repeats(numbers: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Leave out those that equal the one before: of sorted numbers in a twentieth of `np.unique`'s time."""
    is_first = np.ones(len(numbers), dtype=np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=is_first[1:])
    return numbers[is_first]


def _buckets(prints: NDArray[np.uint32]) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the bucket of each of the fingerprints (F,) in each table."""
    low = prints & np.uint32((1 << _BITS) - 1)
    return low, (prints * _SPREAD) >> np.uint32(32 - _BITS)
