"""
Segments that still lie in vLLM's own KV blocks: copies of them are made on the device, not from host memory.

    place     the blocks that a segment's request had when it was saved, each with the hash that vLLM's prefix
              cache gave it; blocks that are not full have none, and are never read
    copied    the same rows in the blocks of a request that copied them, see `copied_rows.py`
    valid     while a block has that same hash. vLLM removes it before it gives the block to another request
    pinned    a load reads these blocks: they count as used, so that vLLM does not give them away

A load pins blocks only until its copies are made. While pinned blocks would otherwise be free, vLLM waits for
them instead of preempting a request. Without prefix caching blocks have no hashes, and nothing is found here.

Everything runs on the scheduler's thread.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from delta_tree import SegmentId, Span
from kvshare.vllm_connector.metadata import BlockSource
from kvshare.vllm_connector.scheduler.block_places import BlockPlace, hash_of, place_in
from kvshare.vllm_connector.scheduler.copied_rows import CopiedRows
from kvshare.vllm_protocol.messages import WireCopy
from kvshare.vllm_protocol.places import Moved

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

_MANY = 16
_PLACES_OF_POOL = 2  # limit of the blocks of all places, and of all copied rows: the pool's blocks times this


class BlockDonors:
    """One per scheduler. Finds nothing before `bind`."""

    def __init__(self) -> None:
        self.can_be_copied = True  # by the workers
        self._moved: tuple[list[SegmentId], list[SegmentId]] = [], []  # segments that came, that left
        self._pool: BlockPool | None = None
        self._block_size = 0
        self._places: OrderedDict[SegmentId, BlockPlace] = OrderedDict()  # the newest last
        self._num_blocks = 0  # of all places
        self._copied = CopiedRows()
        self.num_steps = 0  # planned steps
        self._num_ended = 0  # the number of the last step that has ended
        # The last full block of each place, which vLLM gives away first, and its hash.
        self._last: dict[SegmentId, tuple[KVCacheBlock, BlockHashWithGroupId]] = {}
        self._pinned: dict[str, list[KVCacheBlock]] = {}  # by the request whose load reads them
        self._num_pins: Counter[int] = Counter()  # loads that read a block

    @property
    def are_found(self) -> bool:
        """Return whether this vLLM has blocks that can be donors."""
        return self.can_be_copied and self._pool is not None and self._pool.enable_caching

    @property
    def has_pinned(self) -> bool:
        return bool(self._pinned)

    def bind(self, pool: BlockPool, *, block_size: int) -> None:
        """Use the pool of vLLM's only group of blocks; `block_size`: tokens of a block."""
        self._pool, self._block_size = pool, block_size

    def note(self, segment_id: SegmentId, span: Span, block_ids: Sequence[int]) -> None:
        """Note that the blocks of a request hold a segment at the positions `span`, computed by then."""
        place = self._place_in(span, block_ids) if self.are_found else None
        self._forget_places([segment_id])
        if place is not None and place.last_full is not None:
            assert self._pool is not None, "something was found in it"
            self._places[segment_id] = place
            self._num_blocks += len(place.block_ids)
            block_id, known = place.last_full
            self._last[segment_id] = self._pool.blocks[block_id], known
            self._moved[0].append(segment_id)
            self._forget_oldest()

    def note_again(self, segment_id: SegmentId, span: Span, block_ids: Sequence[int]) -> None:
        """
        Note a place again, as more of its blocks may be full now.

        Nothing changes if the request was preempted meanwhile and has computed rows a second time.
        """
        if (known := self._places.get(segment_id)) is not None and known.is_part_of(
            self._place_in(span, block_ids)
        ):
            self.note(segment_id, span, block_ids)

    def note_copied(self, copies: Iterable[WireCopy], block_ids: Sequence[int]) -> None:
        """Note that the blocks of a request hold what these copies wrote, none of it computed again."""
        if self.are_found:
            assert self._pool is not None, "something can be found in it"
            most = _PLACES_OF_POOL * self._pool.num_gpu_blocks
            self._copied.note(copies, block_ids, self._pool, self._block_size, most_blocks=most)

    def forget(self, segment_ids: Collection[SegmentId]) -> None:
        """Forget dropped segments. Copies under way go on."""
        self._copied.forget(segment_ids)
        self._forget_places(segment_ids)

    def _forget_places(self, segment_ids: Iterable[SegmentId]) -> None:
        for segment_id in segment_ids:
            if (place := self._places.pop(segment_id, None)) is not None:
                self._num_blocks -= len(place.block_ids)
                self._leave([segment_id])

    def clear(self) -> None:
        """Forget all places, because the weights have changed."""
        self._leave(tuple(self._last))
        self._places.clear()
        self._copied.clear()
        self._num_blocks = 0

    @property
    def are_short(self) -> bool:
        """Return whether less than half of the pool is free: blocks kept for a save may soon be missed."""
        return self._pool is not None and 2 * self._pool.get_num_free_blocks() < self._pool.num_gpu_blocks

    @property
    def num_in_pool(self) -> int:
        """Return the number of vLLM's blocks; 0 before `bind`."""
        return self._pool.num_gpu_blocks if self._pool is not None else 0

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks so many tokens take; 0 before `bind`."""
        return -(-num_tokens // self._block_size) if self._block_size else 0

    def num_full(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """Return how many of a request's first tokens lie in full blocks with hashes."""
        size = self._block_size
        full = range(num_tokens // size)
        return next((n for n in full if self._hash(block_ids[n], (n + 1) * size) is None), len(full)) * size

    def block_ids(self, segment_id: SegmentId) -> tuple[int, ...]:
        return place.block_ids if (place := self._places.get(segment_id)) is not None else ()

    def note_end(self, number: int) -> None:
        """Note that a step has ended, and with it all earlier ones."""
        self._num_ended = max(self._num_ended, number)

    def has(self, segment_id: SegmentId, span: Span) -> bool:
        """Return whether these tokens of a segment lie in blocks now."""
        return self.find(segment_id, span) is not None

    def whole(self, segment_id: SegmentId) -> tuple[tuple[int, ...], Span] | None:
        """Return the blocks that hold a whole segment now, and its positions in them; else None."""
        place = self._places.get(segment_id)
        if place is None or self._own(place, Span(0, place.num_tokens)) is None:
            return None
        return place.block_ids, Span(place.before, place.before + place.num_tokens)

    def take_left(self) -> list[SegmentId]:
        """Return the segments whose last full block vLLM has given away since the last call."""
        left = [each for each, (block, known) in self._last.items() if block.block_hash is not known]
        self._leave(left)
        return left

    def take_moved(self) -> Moved | None:
        """Return the segments that came to blocks and left them, if any came or many left; else None."""
        came, left = self._moved
        if not came and len(left) < _MANY:
            return None
        self._moved = [], []
        return Moved(tuple(each for each in dict.fromkeys(came) if each in self._last), tuple(left))

    def next_given_away(self, count: int) -> set[int]:
        """Return the `count` free blocks that vLLM gives away first."""
        assert self._pool is not None
        block_ids: set[int] = set()
        block = self._pool.free_block_queue.fake_free_list_head.next_free_block
        while len(block_ids) < count and block is not None and block.block_id >= 0:
            block_ids.add(block.block_id)
            block = block.next_free_block
        return block_ids

    def renew(self, segment_ids: Iterable[SegmentId], *, before: int | None = None) -> None:
        """
        Let vLLM give the free blocks of these segments away last: requests are about to copy from them.

        `before`: only those of the next so many blocks that vLLM gives away; None: all
        """
        if self._pool is None:
            return
        leaving = None if before is None else self.next_given_away(before)
        for segment_id in segment_ids:
            block_ids = place.block_ids if (place := self._places.get(segment_id)) is not None else ()
            if (
                not block_ids
                or (leaving is not None and leaving.isdisjoint(block_ids))
                or self.whole(segment_id) is None
            ):
                continue
            blocks = [self._pool.blocks[block_id] for block_id in block_ids]
            self._pool.touch(blocks)
            self._pool.free_blocks(reversed(blocks))

    def pin(self, request_id: str, sources: Iterable[BlockSource]) -> None:
        """Pin the blocks that a request's load reads, found since the last blocks were given away."""
        block_ids = list(dict.fromkeys(n for source in sources for n in source.block_ids))
        if block_ids:
            assert self._pool is not None, "something was found in it"
            blocks = [self._pool.blocks[block_id] for block_id in block_ids]
            self._pool.touch(blocks)
            self._pinned[request_id] = blocks
            self._num_pins.update(block_ids)

    def unpin(self, request_ids: Iterable[str]) -> None:
        """Unpin blocks of loads whose copies are made. Those that no request uses are free, reused last."""
        for request_id in request_ids:
            if (blocks := self._pinned.pop(request_id, None)) is not None:
                assert self._pool is not None, "something was found in it"
                self._num_pins -= Counter(block.block_id for block in blocks)
                self._pool.free_blocks(reversed(blocks))  # the end of a prompt is reused before its begin

    def reuse_first(self, block_ids: Sequence[int], *, stored: Iterable[Span]) -> None:
        """
        Let vLLM reuse the blocks of an ending request with a private salt before those of donors, except for
        blocks with `stored` tokens: no other request can find them in vLLM's prefix cache.
        """
        if self._pool is None or not self._pool.enable_caching:
            return
        size, blocks = self._block_size, self._pool.blocks
        kept = {n for span in stored for n in range(span.start // size, -(-span.end // size))}
        own = (block_id for n, block_id in enumerate(block_ids) if n not in kept)
        self._pool.evict_blocks({block_id for block_id in own if blocks[block_id].ref_cnt == 1})

    @property
    def would_free(self) -> bool:
        """Return whether some pinned blocks are used by no request, so they are free once copies are made."""
        if self._pool is None:
            return False
        blocks = self._pool.blocks
        return any(blocks[block_id].ref_cnt == count for block_id, count in self._num_pins.items())

    def find(self, segment_id: SegmentId, span: Span) -> BlockSource | None:
        """Return where these tokens of a segment lie now, as a whole; else None."""
        if self._pool is None:
            return None
        place = self._places.get(segment_id)
        source = self._own(place, span) if place is not None else None
        return source or self._copied.find(segment_id, span, self._pool, self._block_size)

    def _own(self, place: BlockPlace, span: Span) -> BlockSource | None:
        assert self._pool is not None, "it has places"
        source = place.source(span, self._pool, block_size=self._block_size)
        if source is None or place.step <= self._num_ended:
            return source
        return replace(source, follows_steps=True)

    def _leave(self, segment_ids: Iterable[SegmentId]) -> None:
        self._moved[1].extend(each for each in segment_ids if self._last.pop(each, None) is not None)

    def _place_in(self, span: Span, block_ids: Sequence[int]) -> BlockPlace:
        assert self._pool is not None, "it is bound"
        return place_in(self._pool, span, block_ids, block_size=self._block_size, step=self.num_steps)

    def _hash(self, block_id: int, num_tokens: int) -> BlockHashWithGroupId | None:
        assert self._pool is not None, "it is bound"
        return hash_of(self._pool, block_id, num_tokens)

    def _forget_oldest(self) -> None:
        assert self._pool is not None
        while self._num_blocks > _PLACES_OF_POOL * self._pool.num_gpu_blocks:
            self._forget_places([next(iter(self._places))])
