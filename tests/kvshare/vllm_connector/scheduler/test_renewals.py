"""Which blocks of donors are given away last while a request waits that copies from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId
from tests.kvshare.vllm_connector.scheduler.test_block_donors import (
    BLOCKS,
    SEGMENT,
    SIZE,
    WHOLE,
    fill,
    ids,
    new_donors,
    new_pool,
)

if TYPE_CHECKING:
    from kvshare.vllm_connector.scheduler.renewals import Renewals
    from kvshare.vllm_connector.scheduler.waiting import Waiting

OTHER = SegmentId(2)


class Pool:
    """A donor whose blocks are given away first, and one whose blocks are given away later."""

    def __init__(self) -> None:
        from kvshare.vllm_connector.scheduler.renewals import Renewals
        from kvshare.vllm_connector.scheduler.waiting import Waiting

        pool = new_pool()
        self.donors = new_donors(pool)
        first, *rest = fill(pool, 3, num_full=3, name=b"a"), *fill(pool, BLOCKS - 6, num_full=0, name=b"b")
        later = fill(pool, 3, num_full=3, name=b"c")
        for segment_id, own in ((SEGMENT, first), (OTHER, later)):
            self.donors.note(segment_id, WHOLE, ids(own))
        self.own: dict[SegmentId, set[int]] = {SEGMENT: {*ids(first)}, OTHER: {*ids(later)}}
        for own in (first, rest, later):
            pool.free_blocks(own)
        self.waiting: Waiting = Waiting()
        self.renewals: Renewals = Renewals(self.donors, self.waiting)

    def next(self, count: int) -> set[int]:
        return self.donors.next_given_away(count)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    from kvshare.vllm_connector.scheduler import renewals

    monkeypatch.setattr(renewals, "_MARGIN", 0)
    return Pool()


def test_a_request_that_is_next_renews_what_it_would_take_itself(pool: Pool) -> None:
    """What lies further back stays where it is."""
    before = pool.next(BLOCKS)
    pool.waiting.arrive(["r"])
    pool.renewals.arrive("r", {SEGMENT, OTHER}, num_tokens=len(before - pool.own[OTHER]) * SIZE)
    assert pool.own[SEGMENT].isdisjoint(pool.next(BLOCKS - 3))
    assert pool.own[OTHER] <= pool.next(BLOCKS - 3)


def test_a_request_behind_others_renews_all(pool: Pool) -> None:
    """They take blocks before."""
    pool.waiting.arrive(["other", "r"])
    pool.renewals.arrive("r", {SEGMENT, OTHER}, num_tokens=SIZE)
    assert (pool.own[SEGMENT] | pool.own[OTHER]).isdisjoint(pool.next(BLOCKS - 6))


@pytest.mark.parametrize("admitted", [True, False])
def test_one_that_still_waits_after_the_step_renews_all(pool: Pool, *, admitted: bool) -> None:
    """One that is admitted has pinned what it copies from."""
    pool.waiting.arrive(["r"])
    pool.renewals.arrive("r", {SEGMENT}, num_tokens=0)
    if admitted:
        pool.waiting.admit("r", loads=True)
    assert pool.own[SEGMENT] <= pool.next(BLOCKS - 3)
    pool.renewals.end_step()
    assert pool.own[SEGMENT].isdisjoint(pool.next(BLOCKS - 3)) != admitted
    pool.renewals.end_step()
