"""
Finds the stored prompts that start with the same tokens, in microseconds.

A prompt is cut into whole blocks of tokens, and each block is hashed to an 8-byte digest. A prompt's key is
all its digests in order. In the sorted list of a namespace's keys, the key with the longest common prefix is
next to where the query would be inserted. This takes 8 bytes per block; a dictionary would take about 130.

    key = digest(block 0) | digest(block 1) | ... | prompt id, 8 bytes each

The caller compares the token ids, and extends a match past its last whole block.
"""

import hashlib
from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

_DIGEST_BYTES = 8
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Prompts that share the longest known prefix; `num_tokens` is a whole number of blocks."""

    prompt_ids: tuple[int, ...]
    num_tokens: int
    digests: bytes = field(default=b"", repr=False)


class PrefixTable:
    """Prefix lookup over the prompts of many namespaces. Used from one thread."""

    def __init__(self, block_size: int, *, max_hits: int = 4) -> None:
        if block_size < 1 or max_hits < 1:
            raise ValueError(f"block_size {block_size} and max_hits {max_hits} must be >= 1")
        self.block_size = block_size
        self._max_hits = max_hits
        self._keys: defaultdict[str, list[bytes]] = defaultdict(list)  # by namespace, sorted
        self._key_of: defaultdict[str, dict[int, bytes]] = defaultdict(dict)  # by namespace and prompt

    def add(self, namespace: str, prompt_id: int, token_ids: NDArray[np.int32]) -> None:
        """Store a prompt, replacing one of the same id."""
        self.remove(namespace, prompt_id)
        key = self._digests(namespace, token_ids) + prompt_id.to_bytes(_DIGEST_BYTES, "big")
        insort(self._keys[namespace], key)
        self._key_of[namespace][prompt_id] = key

    def remove(self, namespace: str, prompt_id: int) -> None:
        """Forget a prompt; others with the same blocks stay. Unknown ones are ignored."""
        if (key := self._key_of.get(namespace, {}).pop(prompt_id, None)) is not None:
            keys = self._keys[namespace]
            del keys[bisect_left(keys, key)]
            if not keys:
                del self._keys[namespace], self._key_of[namespace]

    def longest(self, namespace: str, token_ids: NDArray[np.int32]) -> PrefixHit | None:
        """
        Return the stored prompts that share the most whole leading blocks with `token_ids`.

        At most `max_hits` of them, newest (highest) ids among their neighbours first; None if not
        even the first block is known.
        """
        keys = self._keys.get(namespace, [])
        # Digests are computed only as far as a stored prompt matches. Most misses are decided by the first
        # block, and a long prompt seldom matches another one to its end.
        wanted, num_blocks = b"", 1
        while len(token_ids) >= (start := len(wanted) // _DIGEST_BYTES * self.block_size) + self.block_size:
            wanted += self._digests(namespace, token_ids[start : start + num_blocks * self.block_size])
            position = bisect_left(keys, wanted)
            if position == len(keys) or not keys[position].startswith(wanted):
                break
            num_blocks = 64
        return self._nearest(keys, wanted)

    def shares(self, namespace: str, prompt_id: int, hit: PrefixHit) -> bool:
        """Return whether a stored prompt starts with the prefix that `longest` has found."""
        key = self._key_of.get(namespace, {}).get(prompt_id)
        return key is not None and key.startswith(hit.digests)

    def contains(self, namespace: str, prompt_id: int) -> bool:
        return prompt_id in self._key_of.get(namespace, {})

    def _digests(self, namespace: str, token_ids: NDArray[np.int32]) -> bytes:
        """Return the digests of all whole blocks in order, salted with the namespace."""
        tokens = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
        step = self.block_size * _TOKEN_BYTES
        salt = hashlib.blake2b(namespace.encode(), digest_size=hashlib.blake2b.SALT_SIZE).digest()
        return b"".join(
            hashlib.blake2b(
                tokens[start : start + step], digest_size=_DIGEST_BYTES, salt=salt, person=b"kvshare.prefix"
            ).digest()
            for start in range(0, len(tokens) - step + 1, step)
        )

    def _nearest(self, keys: list[bytes], wanted: bytes) -> PrefixHit | None:
        position = bisect_left(keys, wanted)
        around = keys[max(0, position - 1) : position + 1]
        num_bytes = max((_common_bytes(key, wanted) for key in around), default=0)
        if num_bytes == 0:
            return None
        prefix = wanted[:num_bytes]
        nearby = keys[max(0, position - self._max_hits) : position + self._max_hits]
        sharing = (key[-_DIGEST_BYTES:] for key in nearby if key.startswith(prefix))
        ids = sorted((int.from_bytes(prompt_id, "big") for prompt_id in sharing), reverse=True)
        return PrefixHit(
            prompt_ids=tuple(ids[: self._max_hits]),
            num_tokens=num_bytes // _DIGEST_BYTES * self.block_size,
            digests=prefix,
        )


def _common_bytes(key: bytes, wanted: bytes) -> int:
    """Return the common prefix in bytes, whole digests only. The prompt id at the key's end never counts."""
    ends = range(_DIGEST_BYTES, min(len(key) - _DIGEST_BYTES, len(wanted)) + 1, _DIGEST_BYTES)
    return _DIGEST_BYTES * bisect_left(ends, True, key=lambda end: key[:end] != wanted[:end])
