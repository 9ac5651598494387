"""
The exact policies: `prefix`, vLLM's prefix cache, and `chunks`, LMCache's blend on top of it.

The prefix cache follows vllm/v1/core/block_pool.py of vLLM 0.32, for requests that run one after another: a
request takes its hits out of the queue of free blocks, then new blocks from the front of that queue (which
evicts what they held). At its end it returns all of them, last block first, so that a block is evicted before
its parent. Blocks that were never full go to the front.
"""

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import xxhash

from delta_tree import Span, TokenIds, merge
from delta_tree.kgrams import kgram_hashes
from kvshare.logs.requests import Requester, any_of
from kvshare.replay.policies.base import CachePolicy, stored_tokens
from kvshare.replay.requests import Outcome, TokenizedRequest

Digest = bytes


@dataclass(eq=False, kw_only=True)
class PrefixPolicy(CachePolicy):
    """Whole blocks of an equal prefix, of prompts and answers alike; the last token is always computed."""

    family = "prefix"

    block_size: int = 16

    def __post_init__(self) -> None:
        capacity = self.capacity_tokens
        self._pool = UnboundedPool() if capacity is None else BlockPool(capacity // self.block_size)

    def observe(self, request: TokenizedRequest) -> Outcome:
        began = time.perf_counter()
        logged, size = request.logged, self.block_size
        tokens = stored_tokens(request)
        digests = block_digests(logged.namespace, tokens, size)
        owners = self._pool.find(digests[: max(0, request.num_tokens - 1) // size])
        lookup_s = time.perf_counter() - began
        self._pool.serve(digests, len(owners), -(-len(tokens) // size), logged.requester)
        num_hit = len(owners) * size
        return Outcome(
            hits=(Span(0, num_hit),) if num_hit else (),
            num_exact=num_hit,
            num_donors=1 if num_hit else 0,
            shifts=(0,) if num_hit else (),
            cross_user=any_of(map(logged.requester.is_other, owners)),
            lookup_s=lookup_s,
            num_stored_bytes=len(self._pool) * size * self.context.bytes_per_token,
        )


def block_digests(namespace: str, token_ids: TokenIds, block_size: int) -> list[Digest]:
    """Return one digest per full block, of its tokens, all tokens before it and the namespace."""
    tokens, step = token_ids.tobytes(), block_size * token_ids.itemsize
    parent = xxhash.xxh3_128_digest(namespace.encode())
    digests = []
    for start in range(0, len(tokens) - step + 1, step):
        parent = xxhash.xxh3_128_digest(parent + tokens[start : start + step])
        digests.append(parent)
    return digests


class UnboundedPool:
    """A cache that never evicts. It records who computed each block first."""

    def __init__(self) -> None:
        self._owners: dict[Digest, Requester] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def find(self, digests: Sequence[Digest]) -> list[Requester]:
        """Return the owners of the leading blocks that are cached."""
        owners: list[Requester] = []
        for digest in digests:
            if (owner := self._owner(digest)) is None:
                break
            owners.append(owner)
        return owners

    def serve(self, digests: Sequence[Digest], num_hit: int, num_blocks: int, requester: Requester) -> None:
        """Run a request of `num_blocks` blocks, the last of which may not be full."""
        for digest in digests[num_hit:]:
            self._owners.setdefault(digest, requester)

    def _owner(self, digest: Digest) -> Requester | None:
        return self._owners.get(digest)


class BlockPool(UnboundedPool):
    """Full blocks by their digest, and the queue of free blocks."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self._num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # front: taken first
        self._content: dict[int, tuple[Digest, Requester]] = {}  # of a block, and who computed it
        self._blocks: dict[Digest, dict[int, None]] = {}  # of equal blocks vLLM stores all

    def __len__(self) -> int:
        return len(self._content)

    def serve(self, digests: Sequence[Digest], num_hit: int, num_blocks: int, requester: Requester) -> None:
        """Run a request of `num_blocks` blocks; one that needs more than there are changes nothing."""
        if num_blocks > self._num_blocks:
            return
        used = [next(iter(self._blocks[digest])) for digest in digests[:num_hit]]
        for block in used:
            del self._free[block]
        for place in range(num_hit, num_blocks):
            block, _ = self._free.popitem(last=False)
            if block in self._content:
                evicted, _ = self._content.pop(block)
                del self._blocks[evicted][block]
                if not self._blocks[evicted]:
                    del self._blocks[evicted]
            used.append(block)
            if place < len(digests):
                self._content[block] = (digests[place], requester)
                self._blocks.setdefault(digests[place], {})[block] = None
        for block in reversed(used):
            self._free[block] = None
            if block not in self._content:
                self._free.move_to_end(block, last=False)

    def _owner(self, digest: Digest) -> Requester | None:
        blocks = self._blocks.get(digest)
        return self._content[next(iter(blocks))][1] if blocks else None


class _Chunk(NamedTuple):
    tokens: bytes
    start: int  # in the prompt that it was computed for
    requester: Requester


@dataclass(eq=False, kw_only=True)
class ChunksPolicy(CachePolicy):
    """
    An exact prefix, and whole chunks of 256 tokens at any position, as LMCache's blend reuses them.

    It follows LMCache's open blend server (v1/multiprocess/modules/blend): stored prompts are cut every 256
    tokens, and the first chunk is left to the prefix cache. A prompt is searched at every offset, each stored
    chunk is used once, and of overlapping ones the leftmost. One changed token loses its whole chunk. Unlike
    LMCache, this compares the tokens. A finite store holds chunks only: the prefix cache has another one of
    the same size.
    """

    family = "chunks"

    chunk_size: int = 256
    block_size: int = 16

    def __post_init__(self) -> None:
        self._prefix = PrefixPolicy(self.name, self.context, self.capacity_tokens, block_size=self.block_size)
        self._chunks: OrderedDict[tuple[str, int], _Chunk] = OrderedDict()  # least recently used first

    def observe(self, request: TokenizedRequest) -> Outcome:
        exact = self._prefix.observe(request)
        began = time.perf_counter()
        matches = self._find(request, exact.num_hit)
        lookup_s = exact.lookup_s + time.perf_counter() - began
        self._store(request)
        last = max(0, request.num_tokens - 1)  # always computed: the answer starts from it
        chunks = [Span(at, min(at + self.chunk_size, last)) for at, _ in matches]
        requester, num_chunk_tokens = request.logged.requester, len(self._chunks) * self.chunk_size
        donors = {(chunk.requester, chunk.start - at) for at, chunk in matches}
        are_others = (requester.is_other(chunk.requester) for _, chunk in matches)
        return replace(
            exact,
            hits=merge([*exact.hits, *chunks]),
            num_donors=exact.num_donors + len(donors),
            shifts=(*exact.shifts, *(at - chunk.start for at, chunk in matches)),
            cross_user=any_of([exact.cross_user, *are_others]),
            lookup_s=lookup_s,
            num_stored_bytes=exact.num_stored_bytes + num_chunk_tokens * self.context.bytes_per_token,
        )

    def _find(self, request: TokenizedRequest, start: int) -> list[tuple[int, _Chunk]]:
        """Chunks after the prefix with their positions in the prompt, left to right, without overlaps."""
        tokens, size, namespace = request.token_ids, self.chunk_size, request.logged.namespace
        matches: list[tuple[int, _Chunk]] = []
        used, end = set[int](), start
        for at, code in enumerate(kgram_hashes(tokens[start:], size).tolist(), start=start):
            if at < end or code in used:
                continue
            chunk = self._chunks.get((namespace, code))
            if chunk is not None and chunk.tokens == tokens[at : at + size].tobytes():
                matches.append((at, chunk))
                used.add(code)
                end = at + size
                self._chunks.move_to_end((namespace, code))
        return matches

    def _store(self, request: TokenizedRequest) -> None:
        tokens, size = stored_tokens(request), self.chunk_size
        for start in range(size, len(tokens) - size + 1, size):
            part = tokens[start : start + size]
            key = (request.logged.namespace, int(kgram_hashes(part, size)[0]))
            self._chunks.setdefault(key, _Chunk(part.tobytes(), start, request.logged.requester))
            self._chunks.move_to_end(key)
        while self.capacity_tokens is not None and len(self._chunks) * size > self.capacity_tokens:
            self._chunks.popitem(last=False)
