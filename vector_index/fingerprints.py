"""
Token fingerprints by winnowing: a few hundred numbers that identify a prompt's passages.

Every k-gram of token ids is hashed, and the minimum of each window of w consecutive hashes is a fingerprint.
Two prompts that share a passage share its windows, and so their minima. Only equal tokens count, at any
position: this finds templates, retrieved chunks and shifted chats. This file knows no backend.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

# Odd 64-bit constants (splitmix64, murmur3). They must never change: the hashes are stored on disk.
_TOKEN_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BASE = np.uint64(0xBF58476D1CE4E5B9)
_FINAL_FACTOR = np.uint64(0xFF51AFD7ED558CCD)
_HALF = np.uint64(32)


def fingerprints(
    token_ids: NDArray[np.int32],
    *,
    kgram: int,
    window: int,
    max_fingerprints: int | None = None,
) -> NDArray[np.uint32]:
    """
    The winnowed fingerprints of a prompt, sorted and unique; the same in every process.

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
    prints = _without_repeats(np.sort(_without_repeats(minima)))
    return prints[:max_fingerprints]


def _without_repeats(values: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """The values without those that equal the value before them."""
    is_first = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=is_first[1:])
    return values[is_first]


def bind(prints: NDArray[np.uint32], namespace: str) -> NDArray[np.uint32]:
    """
    The same fingerprints, mapped by a bijection that differs per namespace, sorted.

    Without it a passage in many namespaces (a public system prompt) would have one posting list for all of
    them, and a search in one namespace would read the postings of all.
    """
    digest = hashlib.blake2b(namespace.encode(), digest_size=4, person=b"kvshare.prints").digest()
    return np.sort(prints ^ np.uint32(int.from_bytes(digest, "little")))


def _kgram_hashes(token_ids: NDArray[np.int32], kgram: int) -> NDArray[np.uint32]:
    """(T,) token ids -> (T - kgram + 1,) hashes of the k-grams that start at each position."""
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
    """(H,) -> (H - window + 1,): the minimum of every window, in log2(window) steps."""
    minima = hashes
    width = 1
    while width * 2 <= window:
        minima = np.minimum(minima[:-width], minima[width:])
        width *= 2
    rest = window - width
    return np.minimum(minima[:-rest], minima[rest:]) if rest else minima
