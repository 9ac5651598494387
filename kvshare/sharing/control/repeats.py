"""
Remembers stretches of earlier prompts, so that only prompts that are likely to be copied are stored.
"""

from __future__ import annotations

import hashlib
import threading

import numpy as np
import numpy.typing as npt

from delta_tree import TokenIds, kgram_hashes

_KGRAM = 16  # tokens
_SAMPLED = 32  # one of so many stretches is remembered: those with a multiple of this as hash
_NUM_BITS = 22
_NUM_SLOTS = 2**_NUM_BITS
_MOST_FILLED = 2**16  # slots of one table; then the older table is emptied. Both have 4 million prompt tokens
_HALF, _QUARTER = 0.5, 0.25  # of a prompt
_MIX = np.uint64(0x9E3779B97F4A7C15)


class Repeats:
    """
    Stretches of recent prompts, as filled slots of two tables of 4 MiB. No token is kept. Thread-safe.

    At most one new stretch in 32 is taken for one that was seen before.
    """

    def __init__(self) -> None:
        self._new = np.zeros(_NUM_SLOTS, dtype=np.bool_)
        self._old = np.zeros(_NUM_SLOTS, dtype=np.bool_)
        self._num_filled = 0
        self._lock = threading.Lock()

    def is_worth_saving(self, namespace: str, token_ids: TokenIds, *, reused: float) -> bool:
        """
        Return whether a later prompt is likely to copy from this one, of which a share `reused` is copied.

        It is likely if at least half of the prompt is copied: it is one of a family. Or if at least a quarter
        occurred before and is not copied: such text repeats, but is not stored. A prompt of which less than
        half is copied is remembered.
        """
        return reused >= _HALF or self._seen(_slots(namespace, token_ids)) - reused >= _QUARTER

    def _seen(self, slots: npt.NDArray[np.uint64]) -> float:
        """Return the share of these slots that was filled, and fill all of them."""
        if not len(slots):
            return 0.0
        with self._lock:
            share = float((self._new[slots] | self._old[slots]).mean())
            self._num_filled += len(slots)
            if self._num_filled > _MOST_FILLED:
                self._old, self._new = self._new, np.zeros(_NUM_SLOTS, dtype=np.bool_)
                self._num_filled = len(slots)
            self._new[slots] = True
        return share


def _slots(namespace: str, token_ids: TokenIds) -> npt.NDArray[np.uint64]:
    """Return the slots of a prompt's sampled stretches in the tables. Other namespaces have other slots."""
    hashes = kgram_hashes(token_ids, _KGRAM)
    hashes = hashes[hashes % np.uint64(_SAMPLED) == 0]
    own = np.uint64(int.from_bytes(hashlib.blake2b(namespace.encode(), digest_size=8).digest()))
    slots: npt.NDArray[np.uint64] = ((hashes ^ own) * _MIX) >> np.uint64(64 - _NUM_BITS)
    return slots
