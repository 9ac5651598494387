"""
The exact arms: `prefix`, what vLLM's prefix cache reuses, and `chunks`, what LMCache's blend does beside it.

The prefix cache follows vllm/v1/core/block_pool.py of vLLM 0.32, for requests that run one after the other:
a request takes its hits out of the queue, then new blocks from its front (which evicts what they held), and
gives all back at its end, last block first, so that leaves go before their parents. Blocks that were never
full go to the front.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import xxhash

from delta_tree import Span, TokenIds, merge
from delta_tree.kgrams import kgram_hashes
from kvshare.replay.arms.base import Arm, stored_tokens
from kvshare.replay.requests import Asker, Outcome, TokenizedRequest, any_of

_TOKEN_BYTES = 4
Digest = bytes


@dataclass(eq=False, kw_only=True)
class PrefixArm(Arm):
    """Whole blocks of an equal prefix, prompts and answers alike; at least the last token is computed."""

    family = "prefix"

    block_size: int = 16

    def __post_init__(self) -> None:
        capacity = self.capacity_tokens
        self._pool = EndlessPool() if capacity is None else BlockPool(capacity // self.block_size)

    def observe(self, request: TokenizedRequest) -> Outcome:
        began = time.perf_counter()
        logged, size = request.logged, self.block_size
        tokens = stored_tokens(request)
        digests = block_digests(logged.namespace, tokens, size)
        owners = self._pool.find(digests[: max(0, request.num_tokens - 1) // size])
        lookup_s = time.perf_counter() - began
        num_blocks = -(-len(tokens) // size)
        self._pool.serve(digests, num_hit=len(owners), num_blocks=num_blocks, asker=logged.asker)
        num_hit = len(owners) * size
        return Outcome(
            hits=(Span(0, num_hit),) if num_hit else (),
            num_exact=num_hit,
            num_donors=1 if num_hit else 0,
            shifts=(0,) if num_hit else (),
            cross_user=any_of(map(logged.asker.is_other, owners)),
            lookup_s=lookup_s,
            num_stored_bytes=self._pool.num_cached * size * self.bench.bytes_per_token,
        )


def block_digests(namespace: str, token_ids: TokenIds, block_size: int) -> list[Digest]:
    """One digest per full block, each of the block and all before it, in a domain of the namespace's own."""
    tokens = _content(token_ids)
    step = block_size * _TOKEN_BYTES
    parent = xxhash.xxh3_128_digest(namespace.encode())
    digests = []
    for start in range(0, len(tokens) - step + 1, step):
        parent = xxhash.xxh3_128_digest(parent + tokens[start : start + step])
        digests.append(parent)
    return digests


class EndlessPool:
    """A cache that never evicts. Each digest knows who computed it first."""

    def __init__(self) -> None:
        self._owners: dict[Digest, Asker] = {}

    @property
    def num_cached(self) -> int:
        return len(self._owners)

    def find(self, digests: Sequence[Digest]) -> list[Asker]:
        """The owners of the leading blocks that are cached."""
        owners: list[Asker] = []
        for digest in digests:
            if (owner := self._owner(digest)) is None:
                break
            owners.append(owner)
        return owners

    def serve(self, digests: Sequence[Digest], *, num_hit: int, num_blocks: int, asker: Asker) -> None:
        """Run a request of `num_blocks` blocks, the last of them perhaps not full."""
        for digest in digests[num_hit:]:
            self._owners.setdefault(digest, asker)

    def _owner(self, digest: Digest) -> Asker | None:
        return self._owners.get(digest)


class BlockPool(EndlessPool):
    """A hash chain over `num_blocks` full blocks, and the queue of free ones."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self._num_blocks = num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # front: taken first
        self._held: dict[int, tuple[Digest, Asker]] = {}  # block -> what it holds, and who computed it
        self._blocks: dict[Digest, dict[int, None]] = {}  # twice the same content: vLLM keeps both

    @property
    def num_cached(self) -> int:
        return len(self._held)

    def serve(self, digests: Sequence[Digest], *, num_hit: int, num_blocks: int, asker: Asker) -> None:
        """Run a request of `num_blocks` blocks; one that does not fit is not served from here at all."""
        if num_blocks > self._num_blocks:
            return
        used = [next(iter(self._blocks[digest])) for digest in digests[:num_hit]]
        for block in used:
            del self._free[block]
        for place in range(num_hit, num_blocks):
            block, _ = self._free.popitem(last=False)
            self._forget(block)
            used.append(block)
            if place < len(digests):
                self._held[block] = (digests[place], asker)
                self._blocks.setdefault(digests[place], {})[block] = None
        for block in reversed(used):
            self._free[block] = None
            if block not in self._held:
                self._free.move_to_end(block, last=False)

    def _owner(self, digest: Digest) -> Asker | None:
        blocks = self._blocks.get(digest)
        return self._held[next(iter(blocks))][1] if blocks else None

    def _forget(self, block: int) -> None:
        held = self._held.pop(block, None)
        if held is None:
            return
        blocks = self._blocks[held[0]]
        del blocks[block]
        if not blocks:
            del self._blocks[held[0]]


@dataclass(frozen=True, slots=True)
class _Chunk:
    content: bytes
    start: int  # where it stood
    asker: Asker


@dataclass(eq=False, kw_only=True)
class ChunksArm(Arm):
    """
    An exact prefix, and whole chunks of 256 tokens wherever they stand, as LMCache's blend reuses.

    Follows LMCache's open blend server (v1/multiprocess/modules/blend): stored prompts are cut every 256
    tokens, the first chunk left to the prefix cache; a prompt is searched at every token offset, each stored
    chunk serves once, overlaps go to the leftmost. One changed token loses its whole chunk. Unlike LMCache,
    tokens are compared. A finite store is the chunks' alone: the engine's own prefix cache of the same size
    comes on top.
    """

    family = "chunks"

    chunk_size: int = 256
    block_size: int = 16

    def __post_init__(self) -> None:
        self._prefix = PrefixArm(self.name, self.bench, self.capacity_tokens, block_size=self.block_size)
        self._chunks: OrderedDict[tuple[str, int], _Chunk] = OrderedDict()  # least recently used first

    def observe(self, request: TokenizedRequest) -> Outcome:
        exact = self._prefix.observe(request)
        began = time.perf_counter()
        matches = self._find(request, exact.num_hit)
        lookup_s = exact.lookup_s + time.perf_counter() - began
        self._store(request)
        # The last token is always computed: the answer starts from it.
        last = max(0, request.num_tokens - 1)
        found = [Span(at, min(at + self.chunk_size, last)) for at, _ in matches]
        asker = request.logged.asker
        return replace(
            exact,
            hits=merge([*exact.hits, *found]),
            num_donors=exact.num_donors + len({(chunk.asker, chunk.start - at) for at, chunk in matches}),
            shifts=(*exact.shifts, *(at - chunk.start for at, chunk in matches)),
            cross_user=any_of([exact.cross_user, *(asker.is_other(chunk.asker) for _, chunk in matches)]),
            lookup_s=lookup_s,
            num_stored_bytes=exact.num_stored_bytes
            + len(self._chunks) * self.chunk_size * self.bench.bytes_per_token,
        )

    def _find(self, request: TokenizedRequest, start: int) -> list[tuple[int, _Chunk]]:
        """Chunks behind the prefix and where they are in the prompt, from left to right, without overlaps."""
        tokens, size = request.token_ids, self.chunk_size
        namespace, chunks = request.logged.namespace, self._chunks
        used: set[int] = set()
        matches: list[tuple[int, _Chunk]] = []
        end = start
        for at, code in enumerate(kgram_hashes(tokens[start:], size).tolist(), start=start):
            if at < end or code in used:
                continue
            chunk = chunks.get((namespace, code))
            if chunk is None or chunk.content != _content(tokens[at : at + size]):
                continue
            matches.append((at, chunk))
            used.add(code)
            end = at + size
            chunks.move_to_end((namespace, code))
        return matches

    def _store(self, request: TokenizedRequest) -> None:
        tokens, size = stored_tokens(request), self.chunk_size
        for start in range(size, len(tokens) - size + 1, size):
            part = tokens[start : start + size]
            key = (request.logged.namespace, int(kgram_hashes(part, size)[0]))
            if key not in self._chunks:
                self._chunks[key] = _Chunk(_content(part), start, request.logged.asker)
            self._chunks.move_to_end(key)
        if self.capacity_tokens is not None:
            while len(self._chunks) * size > self.capacity_tokens:
                self._chunks.popitem(last=False)


def _content(tokens: TokenIds) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()
