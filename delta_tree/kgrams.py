"""
Hashes of prompts' k-grams, and a filter that removes those that another prompt cannot have.

Equal hashes only suggest equal tokens: callers compare the tokens before they copy.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int32]
Hashes = npt.NDArray[np.uint32]
Places = npt.NDArray[np.int64]
"""Ascending start positions of k-grams in one prompt."""

# All odd, so that multiplying by them is a bijection modulo 2**32 or 2**64.
_WIDE_TOKEN, _WIDE_BASE = 0xBF58476D1CE4E5B9, 0x9E3779B97F4A7C15
_TOKEN, _BASE, _LAST = np.uint32(0x9E3779B1), 0x85EBCA6B, np.uint32(0xC2B2AE35)
_SLOTS = np.uint32(0x27D4EB2F), np.uint32(0x165667B1)
_BLOCK = 1 << 14  # k-grams hashed at once, so that the arrays fit into the processor's cache
_SIEVED_AT_ONCE = 1 << 14  # hashes, for the same reason
_LONG = 1 << 13  # k-grams: if every candidate has so many, joining them takes longer than separate calls
_SIEVE_BITS = 18  # 256 KiB: with a 2,000-token prompt in it, 1 foreign k-gram in 80,000 passes
_MAX_SIEVE_BITS = 22
_SLOTS_PER_HASH = 16


def kgram_hashes(tokens: Ids, k: int) -> npt.NDArray[np.uint64]:
    """
    Return a 64-bit polynomial hash of each window of `k` tokens, wide enough to identify it in a whole log.

    Shapes:  (T,) int32 -> (max(T - k + 1, 0),) uint64
    """
    if len(tokens) < k:
        return np.empty(0, dtype=np.uint64)
    # Token ids are small and regular; without mixing, the low bits of the hashes would be regular, too.
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(_WIDE_TOKEN)
    mixed ^= mixed >> np.uint64(29)
    hashes: npt.NDArray[np.uint64] = _of_windows(mixed, k, _WIDE_BASE)
    hashes ^= hashes >> np.uint64(32)  # the low bits of a product do not depend on the high bits
    return hashes


def quick_hashes(tokens: Ids, k: int) -> Hashes:
    """
    Return a 32-bit hash of each window of `k` tokens, in a tenth of the time of `kgram_hashes`.

    Processors multiply eight or sixteen such numbers at once. Every second pair of prompts of 45,000 tokens
    has a false hit, so this hash is for comparing a few prompts.
    Shapes:  (T,) int32 -> (max(T - k + 1, 0),) uint32
    """
    hashes = np.empty(max(len(tokens) - k + 1, 0), dtype=np.uint32)
    for start in range(0, len(hashes), _BLOCK):
        block = _of_windows(_mixed(tokens[start : start + _BLOCK + k - 1]), k, _BASE)
        _finished(block, out=hashes[start : start + _BLOCK])
    return hashes


def some_hashes(tokens: Ids, k: int, step: int) -> Hashes:
    """Return every `step`-th of `quick_hashes`: of a long step, in a fraction of the time."""
    if step < k:
        return quick_hashes(tokens, k)[::step]
    starts = np.arange(0, len(tokens) - k + 1, step)
    powers = np.array([pow(_BASE, k - 1 - place, 2**32) for place in range(k)], dtype=np.uint32)
    mixed = _mixed(tokens.take(starts[:, None] + np.arange(k)))
    mixed *= powers
    return _finished(mixed.sum(axis=1, dtype=np.uint32))


def _mixed(tokens: Ids) -> Hashes:
    mixed = tokens.astype(np.uint32)
    mixed += np.uint32(1)
    mixed *= _TOKEN
    mixed ^= mixed >> np.uint32(15)
    return mixed


def _finished(windows: Hashes, out: Hashes | None = None) -> Hashes:
    windows = windows ^ (windows >> np.uint32(16))
    windows *= _LAST
    found: Hashes = np.bitwise_xor(windows, windows >> np.uint32(15), out=out)
    return found


def _of_windows(mixed: npt.NDArray[Any], k: int, base: int) -> npt.NDArray[Any]:
    """Return the polynomial of each window: computed from its two halves, and its last number if k is odd."""
    if k == 1:
        return mixed
    half = k // 2
    scale = mixed.dtype.type(pow(base, half, 2 ** (8 * mixed.itemsize)))
    halves = _of_windows(mixed, half, base)
    windows: npt.NDArray[Any] = halves[:-half] * scale + halves[half:]
    if k % 2:
        windows = windows[:-1] * mixed.dtype.type(base) + mixed[k - 1 :]
    return windows


class Sieve:
    """A Bloom filter over hashes: it rules out cheaply most k-grams that are not in a collection."""

    def __init__(self, hashes: Hashes) -> None:
        wanted = (_SLOTS_PER_HASH * len(hashes)).bit_length()
        self._bits = min(max(wanted, _SIEVE_BITS), _MAX_SIEVE_BITS)
        self._present = np.zeros(1 << self._bits, dtype=np.bool_)
        self._present[low_slots(hashes, self._bits)] = True
        # False positives make a donor look better than it is, so that more donors are aligned in vain. Of the
        # changed k-grams of 30,000 tokens 1 in 100 passed with two slots per hash, 1 in 300 with three.
        self._factors = _SLOTS
        for factor in self._factors:
            self._present[self._high_slots(hashes, factor)] = True

    def passing(self, hashes: Hashes, among: Places | None = None) -> Places:
        """Return the positions (`among`: of these) whose hash may be in the collection, ascending."""
        asked = hashes if among is None else hashes.take(among)
        parts: list[Places] = []
        for start in range(0, max(1, len(asked)), _SIEVED_AT_ONCE):
            parts.append(self._passing(asked[start : start + _SIEVED_AT_ONCE]) + start)
        places = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return places if among is None else among.take(places)

    def _passing(self, hashes: Hashes) -> Places:
        passes = self._present.take(low_slots(hashes, self._bits))
        if 2 * np.count_nonzero(passes) > len(hashes):  # a near-duplicate: selecting first takes longer
            for factor in self._factors:
                passes &= self._present.take(self._high_slots(hashes, factor))
            return np.flatnonzero(passes)
        passed = np.flatnonzero(passes)
        for factor in self._factors:
            passed = passed[self._present.take(self._high_slots(hashes.take(passed), factor))]
        return passed

    def _high_slots(self, hashes: Hashes, factor: np.uint32) -> npt.NDArray[np.intp]:
        return ((hashes * factor) >> np.uint32(32 - self._bits)).astype(np.intp)


def low_slots(hashes: Hashes, bits: int) -> npt.NDArray[np.intp]:
    """Return each hash's slot in a table of `2**bits` slots."""
    return (hashes & np.uint32((1 << bits) - 1)).astype(np.intp)


def hashes_of_all(prompts: Sequence[Ids], k: int) -> list[Hashes]:
    """`quick_hashes` of each prompt, in a few numpy calls in all: see `CandidateKGrams`."""
    joined = quick_hashes(np.concatenate([*prompts, np.empty(0, dtype=np.int32)]), k)
    lengths = [len(prompt) for prompt in prompts]
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    starts = (end - length for end, length in zip(ends, lengths, strict=True))
    return [joined[start : start + max(size - k + 1, 0)] for start, size in zip(starts, lengths, strict=True)]


class CandidateKGrams:
    """
    The hashes of all candidates' k-grams: in one array, unless every candidate is long.

    With one array, filtering takes a few numpy calls in all and not a few per candidate. For prompts of some
    hundred tokens the calls cost more than the computation; for long ones the array would.
    """

    def __init__(self, hashes: Sequence[Hashes], places: Sequence[Places] | None = None) -> None:
        """`places`: for each prompt the positions that may pass; all by default."""
        self._separate = [*hashes] if hashes and min(map(len, hashes)) >= _LONG else None
        if self._separate is not None:
            self._places: list[Places | None] = [None] * len(hashes) if places is None else [*places]
            return
        self._joined = np.concatenate([*hashes, np.empty(0, dtype=np.uint32)])
        lengths = np.array([len(each) for each in hashes], dtype=np.int64)
        ends = np.cumsum(lengths)
        self._bounds = np.stack([ends - lengths, ends], axis=1)
        self._passing: Places | None = None  # of the joined prompts
        if places is not None:
            starts = self._bounds[:, 0].tolist()
            moved = [own + start for own, start in zip(places, starts, strict=True)]
            self._passing = np.concatenate([*moved, np.empty(0, dtype=np.int64)])

    def narrow(self, sieve: Sieve) -> list[Places]:
        """
        Return for each prompt the positions of the k-grams that pass this sieve and all earlier ones.

        The uncovered part of the new prompt only shrinks, so a k-gram that failed once is not tested again.
        """
        if self._separate is not None:
            narrowed = [
                sieve.passing(own, places) for own, places in zip(self._separate, self._places, strict=True)
            ]
            self._places = [*narrowed]
            return narrowed
        self._passing = places = sieve.passing(self._joined, self._passing)
        cuts = places.searchsorted(self._bounds).tolist()
        starts = self._bounds[:, 0].tolist()
        return [places[low:high] - start for (low, high), start in zip(cuts, starts, strict=True)]
