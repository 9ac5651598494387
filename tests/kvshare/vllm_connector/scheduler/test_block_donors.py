"""Segments in the blocks of vLLM's own pool: what is found there, and what it costs the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import WireCopy

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

    from kvshare.vllm_connector.scheduler.block_donors import BlockDonors

SIZE, BLOCKS = 4, 12
SEGMENT = SegmentId(1)
WHOLE = Span(2, 12)  # where the segment lies: in the blocks 0 to 2 of its request


def new_pool(*, caches: bool = True) -> BlockPool:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(BLOCKS + 1, caches, SIZE)  # one is vLLM's own


def fill(pool: BlockPool, num_blocks: int, *, num_full: int, name: bytes = b"a") -> list[Any]:
    """Blocks of a request, the first of which are full."""
    blocks: list[Any] = pool.get_new_blocks(num_blocks)
    request: Any = SimpleNamespace(block_hashes=[name + bytes([number]) for number in range(num_full)])
    if pool.enable_caching:
        pool.cache_full_blocks(request, blocks, 0, num_full, SIZE, 0)
    return blocks


def new_donors(pool: BlockPool) -> BlockDonors:
    from kvshare.vllm_connector.scheduler.block_donors import BlockDonors

    donors = BlockDonors()
    donors.bind(pool, block_size=SIZE)
    return donors


def ids(blocks: list[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def found(donors: BlockDonors, span: Span, name: str = "r") -> Any:
    """Where these tokens of the segment are, while a load reads them; None if they are not there."""
    source = donors.find(SEGMENT, span)
    donors.pin(name, [source] if source is not None else [])
    return source


@pytest.mark.parametrize(
    ("span", "blocks", "first"),
    [
        (Span(0, 10), [0, 1, 2], 2),
        (Span(0, 2), [0], 2),
        (Span(2, 3), [1], 0),
        (Span(3, 10), [1, 2], 1),
        (Span(9, 10), [2], 3),
    ],
)
def test_a_part_of_a_segment_is_found_in_its_blocks(span: Span, blocks: list[int], first: int) -> None:
    """Only the blocks that have something of it, and where it begins in the first one."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    donors.note(SEGMENT, WHOLE, ids(own))
    source = found(donors, span)
    assert source.block_ids == tuple(own[n].block_id for n in blocks)
    assert source.first == first


def test_a_block_that_is_not_full_is_no_donor() -> None:
    """Its request may write there. What lies before it is found."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=2)
    donors.note(SEGMENT, WHOLE, ids(own))
    assert found(donors, Span(0, 7)) is None
    assert found(donors, Span(0, 6)) is not None


def test_blocks_that_were_given_away_are_not_found() -> None:
    """Whoever has them now, and even if the same tokens are computed there again."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    donors.note(SEGMENT, WHOLE, ids(own))
    pool.free_blocks(own)
    again = fill(pool, BLOCKS, num_full=BLOCKS)
    assert [block.block_hash for block in own] == [
        pool.blocks[n].block_hash for n in ids(own)
    ]  # hashed again, by whoever has them
    pool.free_blocks(again)
    assert found(donors, Span(0, 10)) is None


def test_free_blocks_are_donors_and_are_not_given_away_while_they_are_read() -> None:
    """They count as used until the copies are made; then they are the last to be reused."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    donors.note(SEGMENT, WHOLE, ids(own))
    pool.free_blocks(reversed(own))
    assert found(donors, Span(0, 10)) is not None
    assert pool.get_num_free_blocks() == BLOCKS - 3
    assert donors.would_free
    assert not pool.reset_prefix_cache()
    others = pool.get_new_blocks(BLOCKS - 3)
    assert not set(ids(others)) & set(ids(own))
    pool.free_blocks(others)
    donors.unpin(["r"])
    assert pool.get_num_free_blocks() == BLOCKS
    assert not donors.would_free
    assert ids(pool.get_new_blocks(BLOCKS))[-3:] == ids(own)[::-1]


def test_blocks_that_hold_copies_are_reused_first() -> None:
    """Those of an ended request which no other can find, but for what is stored of it."""
    pool = new_pool()
    donors, shared, own = new_donors(pool), fill(pool, 1, num_full=1), fill(pool, 5, num_full=5, name=b"b")
    donors.note(SEGMENT, Span(9, 13), ids(own))
    pool.touch(own[4:])  # another choice of the same request has it, too
    donors.reuse_first(ids(own), stored=[Span(9, 13)])
    pool.free_blocks(shared)
    pool.free_blocks(reversed(own))
    assert set(ids(pool.get_new_blocks(2))) == set(ids(own[:2]))
    assert found(donors, Span(0, 4)) is not None
    assert own[4].block_hash is not None


def test_blocks_that_a_request_holds_would_not_be_free_without_us() -> None:
    """vLLM may preempt: waiting for the copies would bring it nothing."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    donors.note(SEGMENT, WHOLE, ids(own))
    for name in ("r", "s"):
        assert found(donors, Span(0, 10), name) is not None
    assert not donors.would_free
    pool.free_blocks(own)
    assert donors.would_free
    donors.unpin(["r"])
    assert donors.would_free
    donors.unpin(["s", "s", "unknown"])
    assert not donors.would_free
    assert pool.get_num_free_blocks() == BLOCKS


def test_what_is_forgotten_is_not_found() -> None:
    """A segment that is dropped, and all of them when weights change."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    for forget in (lambda: donors.forget([SEGMENT]), donors.clear):
        donors.note(SEGMENT, WHOLE, ids(own))
        forget()
        assert found(donors, Span(0, 10)) is None


def test_a_reset_of_the_prefix_cache_ends_it() -> None:
    """vLLM takes the hashes away: weights may have changed."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    donors.note(SEGMENT, WHOLE, ids(own))
    pool.free_blocks(own)
    assert pool.reset_prefix_cache()
    assert found(donors, Span(0, 10)) is None


def test_without_prefix_caching_nothing_is_found() -> None:
    """Blocks have no hashes then."""
    pool = new_pool(caches=False)
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    donors.note(SEGMENT, WHOLE, ids(own))
    assert not donors.are_found
    assert found(donors, Span(0, 10)) is None


def test_places_are_bounded_by_the_pool() -> None:
    """The oldest are forgotten first."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    for number in range(1000):
        donors.note(SegmentId(number), Span(0, 12), ids(own))
        donors.note(SegmentId(number), Span(0, 12), ids(own))  # the same again takes no more
    assert len(donors._places) == 2 * (BLOCKS + 1) // 3
    assert SegmentId(999) in donors._places
    donors.clear()
    assert donors._num_blocks == 0


def test_the_proxy_is_informed_of_what_lies_in_blocks() -> None:
    """At once of what came; what left is sent with that. Dropped segments have left, too."""
    pool = new_pool()
    donors, blocks = new_donors(pool), fill(pool, 3, num_full=3)
    donors.note(SEGMENT, WHOLE, ids(blocks))
    moved = donors.take_moved()
    assert moved is not None
    assert (moved.came, moved.left) == ((SEGMENT,), ())
    pool.free_blocks(reversed(blocks))
    assert donors.take_left() == []
    pool.get_new_blocks(BLOCKS)
    assert donors.take_left() == [SEGMENT]
    assert donors.take_moved() is None  # it is not much
    donors.note(SegmentId(2), WHOLE, ids(fill_again(pool, blocks)))
    moved = donors.take_moved()
    assert moved is not None
    assert (moved.came, moved.left) == ((SegmentId(2),), (SEGMENT,))


def fill_again(pool: BlockPool, blocks: list[Any]) -> list[Any]:
    """The same blocks, for another request that has got them."""
    request: Any = SimpleNamespace(block_hashes=[b"b" + bytes([number]) for number in range(3)])
    pool.cache_full_blocks(request, blocks, 0, 3, SIZE, 0)
    return blocks


def copied(start: int, length: int, *, moved_by: int = 0) -> WireCopy:
    """To the same positions of another request, or to others. The segment's first token is at 2."""
    return WireCopy(SEGMENT, start, length, 2 + start + moved_by, 2 + start)


@pytest.mark.parametrize(
    ("span", "blocks", "first"), [(Span(0, 6), [0, 1], 2), (Span(1, 2), [0], 3), (Span(2, 6), [1], 0)]
)
def test_rows_are_found_where_they_were_copied_to(span: Span, blocks: list[int], first: int) -> None:
    """In the blocks of a request that runs, although the donor's own were given away."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    donors.note_copied([copied(0, 6)], ids(own))
    source = found(donors, span)
    assert (source.block_ids, source.first) == (tuple(own[n].block_id for n in blocks), first)
    assert not source.follows_steps
    assert found(donors, Span(0, 7)) is None  # the request has computed the last one itself


def test_rows_that_were_moved_are_no_donors() -> None:
    """Their keys were rotated, and rounded."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    donors.note_copied([copied(0, 6, moved_by=1)], ids(own))
    assert found(donors, Span(0, 6)) is None


@pytest.mark.parametrize("how", ["given away", "dropped", "new weights", "not full"])
def test_copied_rows_are_gone_when_their_blocks_are(how: str) -> None:
    """Or the segment is."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=0 if how == "not full" else 3)
    donors.note_copied([copied(0, 6)], ids(own))
    if how == "given away":
        pool.free_blocks(own)
        pool.evict_blocks(set(ids(own)))
    elif how == "dropped":
        donors.forget([SEGMENT])
    elif how == "new weights":
        donors.clear()
    assert found(donors, Span(0, 6)) is None


def test_copied_rows_are_bounded_by_the_pool() -> None:
    """The oldest are forgotten first, and those whose blocks are gone as soon as one looks."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    whole = Span(0, 12)
    for number in range(1000):
        donors.note_copied([WireCopy(SegmentId(number), 0, 12, 0, 0)], ids(own))
    assert len(donors._copied._runs) == 2 * (BLOCKS + 1) // 3
    assert donors.has(SegmentId(999), whole)
    assert not donors.has(SegmentId(900), whole)
    pool.free_blocks(own)
    pool.evict_blocks(set(ids(own)))
    assert not donors.has(SegmentId(999), whole)
    assert SegmentId(999) not in donors._copied._runs
    donors.clear()
    assert donors._copied._num_blocks == 0


def test_rows_follow_the_step_that_computes_them_until_it_has_ended() -> None:
    """After that their copies may begin at once."""
    pool = new_pool()
    donors, own = new_donors(pool), fill(pool, 3, num_full=3)
    donors.num_steps = 5
    donors.note(SEGMENT, WHOLE, ids(own))
    assert found(donors, Span(0, 10), "a").follows_steps
    donors.note_end(4)
    assert found(donors, Span(0, 10), "b").follows_steps
    donors.note_end(5)
    assert not found(donors, Span(0, 10), "c").follows_steps
