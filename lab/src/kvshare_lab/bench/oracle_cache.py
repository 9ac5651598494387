"""
The most exact prefixes that any cache of a size can give on a log: it knows the future (after Belady, 1966).

Prompts and answers are kept in blocks of equal size. When the cache is full, the block leaves whose next use
is furthest; of those of one prompt the last one. No server can do that: it is what others are measured by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvshare.replay.policies.base import stored_tokens
from kvshare.replay.policies.exact import Digest, block_digests
from kvshare.replay.requests import TokenizedRequest

_NEVER = 2**62


@dataclass(frozen=True, slots=True, eq=False)
class RequestBlocks:
    """Of one request: the digests of its whole blocks, and how many of these its prompt may reuse."""

    digests: list[Digest]
    num_reusable: int


def blocks_of(requests: Iterable[TokenizedRequest], block_size: int) -> list[RequestBlocks]:
    """As in the `prefix` policy: a prompt's last token is always computed, and answers are kept."""
    return [
        RequestBlocks(
            block_digests(one.logged.namespace, stored_tokens(one), block_size),
            max(0, one.num_tokens - 1) // block_size,
        )
        for one in requests
    ]


def best_hits(stream: Sequence[RequestBlocks], capacity: int) -> int:
    """How many blocks a cache with room for `capacity` blocks can give at most, over the whole stream."""
    following = _next_uses(stream)
    held: dict[Digest, int] = {}  # -> the request that uses it next
    furthest: list[tuple[int, int, Digest]] = []
    num_hit = 0
    for request, uses in zip(stream, following, strict=True):
        found = (place for place, digest in enumerate(request.digests) if digest not in held)
        num_hit += min(request.num_reusable, next(found, len(request.digests)))
        for place, (digest, at) in enumerate(zip(request.digests, uses, strict=True)):
            held[digest] = at
            heappush(furthest, (-at, -place, digest))
        while len(held) > capacity:
            at, _, digest = heappop(furthest)
            if held.get(digest) == -at:
                del held[digest]
    return num_hit


def _next_uses(stream: Sequence[RequestBlocks]) -> list[list[int]]:
    """Of each block of each request, the number of the next request that has it."""
    coming: dict[Digest, int] = {}
    found: list[list[int]] = []
    for number in range(len(stream) - 1, -1, -1):
        digests = stream[number].digests
        found.append([coming.get(digest, _NEVER) for digest in digests])
        coming.update(dict.fromkeys(digests, number))
    return found[::-1]
