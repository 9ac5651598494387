"""
A cache of prompts in blocks, of which one of the product's policies of eviction says what leaves: a replay of
a log in a hundredth of the time, without index, planner and tiers. Only equal prefixes are found.

As in the product whole prompts leave, blocks that others have stay, and of the last one only the end leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

from delta_tree import EvictionQueue, Use
from kvshare.replay.policies.exact import Digest
from kvshare_lab.bench.oracle_cache import RequestBlocks

_LOOKED_UP = 3  # names, as in `delta_tree.eviction_order`


class BlockCache:
    """Room for `capacity` blocks."""

    def __init__(self, new_queue: Callable[[], EvictionQueue[int]], capacity: int) -> None:
        self._queue, self._capacity = new_queue(), capacity
        self._prompts: dict[int, list[Digest]] = {}
        self._holders: dict[Digest, dict[int, None]] = {}  # of each block its prompts, the newest last
        self._places = count()
        self._floor = 0.0

    def hits(self, stream: Sequence[RequestBlocks]) -> int:
        """How many blocks the requests reuse."""
        return sum(self._ask(number, request) for number, request in enumerate(stream))

    def _ask(self, number: int, request: RequestBlocks) -> int:
        """A request: its prompt is kept, and the prompt that it begins like counts as used."""
        digests = request.digests
        missing = (place for place, digest in enumerate(digests) if digest not in self._holders)
        num_found, depth = next(missing, len(digests)), 1
        if num_found:
            parent = next(reversed(self._holders[digests[num_found - 1]]))
            share = num_found / len(self._prompts[parent])
            before = self._queue.last_use(parent)
            depth = 1 + (before.depth if before is not None and share >= 0.5 else 0)
            use = self._new_use(len(self._prompts[parent]), depth=before.depth if before else 1)
            self._queue.use(parent, use._replace(share=share))
        if digests and num_found < len(digests):
            self._prompts[number] = digests
            for digest in digests:
                self._holders.setdefault(digest, {})[number] = None
            names = [(length, digests[length - 1]) for length in _doubled(len(digests))][::-1]
            earlier = tuple(name for length, name in names if length > num_found)[:_LOOKED_UP]
            use = self._new_use(len(digests), depth=depth)
            self._queue.use(number, use._replace(name=names[0][1], earlier=earlier))
            if num_found:
                self._queue.relieve(parent)
        while len(self._holders) > self._capacity and self._evict(number):
            pass
        return min(num_found, request.num_reusable)

    def _new_use(self, size: int, *, depth: int) -> Use:
        return Use(self._floor + 1.0, next(self._places), size, depth=depth)

    def _evict(self, newest: int) -> bool:
        """The next prompt leaves, or its end if that is enough; the newest one only if no other can."""
        head = self._queue.first({newest}) or self._queue.first()
        if head is None:
            return False
        prompt, excess = head[1], len(self._holders) - self._capacity
        self._floor = max(self._floor, head[0].worth)
        digests = self._prompts[prompt]
        num_left = len(digests)
        while num_left and excess and len(self._holders[digests[num_left - 1]]) == 1:
            num_left, excess = num_left - 1, excess - 1
        if excess or not num_left:
            num_left = 0
            self._queue.remove(prompt, for_room=True)
        for digest in digests[num_left:]:
            del self._holders[digest][prompt]
            if not self._holders[digest]:
                del self._holders[digest]
        if num_left:
            self._prompts[prompt] = digests[:num_left]
        else:
            del self._prompts[prompt]
        return True


def _doubled(length: int) -> list[int]:
    """1, 2, 4, ... up to the length."""
    return [1 << power for power in range(length.bit_length())]
