"""
A pass that begins before its load has arrived, on a GPU that makes copies when the test says: it reads no row
before it is there, and what was wrong is not reported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.worker.early_worker import COPIES, LAYERS, Early
from tests.kvshare.vllm_connector.worker.small_worker import NUM_TOKENS, one_rank
from tests.kvshare.vllm_connector.worker.test_ranks import on_two_ranks

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def early() -> Any:
    with one_rank():
        yield Early()


@pytest.mark.parametrize("late_at", range(LAYERS))
def test_a_layer_that_is_late_is_waited_for_on_the_device(early: Early, late_at: int) -> None:
    """And for no other; for how long is reported, with how much of the copying the pass has hidden."""
    from kvshare.vllm_connector.worker.gpu import Stream

    early.begin(late_at)
    early.gpu.run(Stream.VLLM)
    assert early.read == [(layer, True) for layer in range(late_at)]
    assert early.step(has_forward=False) == {}
    early.gpu.now = 3.0
    early.gpu.run()
    assert early.read == [(layer, True) for layer in range(LAYERS)]
    results = early.step(has_forward=False)
    assert (results["l"].failed, results["l"].unreadable) == (False, frozenset())
    assert early.stages["waited"] == 3.0
    assert (early.stages["hidden"], early.stages["pass"]) == (0.0, 3.0)
    assert len(early.read) == LAYERS, "nothing is computed again"


@pytest.mark.parametrize("damaged", range(LAYERS))
@pytest.mark.parametrize("has_read", [False, True])
def test_a_wrong_sum_fails_the_load(early: Early, damaged: int, *, has_read: bool) -> None:
    """Whether the pass has read the layer by then or not. Nothing of the pass is reported."""
    (stored,) = early.worker.attached.store.find([SegmentId(1)]).values()
    assert stored.sums is not None
    stored.sums[1, damaged] ^= 1
    early.begin(LAYERS if has_read else 1)
    early.gpu.run()
    results = early.step(has_forward=False)
    assert (results["l"].failed, results["l"].unreadable) == (True, frozenset([SegmentId(1)]))
    assert not early.stages.keys() & {"pass", "hidden", "waited"}


@pytest.mark.parametrize("lost_at", range(LAYERS))
def test_a_device_that_fails_fails_the_load(early: Early, lost_at: int) -> None:
    """After some of its layers were read."""
    from kvshare.vllm_connector.worker.gpu import Stream

    early.begin(lost_at)
    early.gpu.run(Stream.VLLM)
    early.gpu.is_lost = True
    results = early.step(has_forward=False)
    assert results["l"].failed
    assert not early.stages.keys() & {"pass", "hidden", "waited"}


@pytest.mark.parametrize("fails_at", range(LAYERS))
def test_a_pass_that_fails_fails_the_load(early: Early, fails_at: int) -> None:
    """When its copies have arrived: until then its blocks are written."""
    early.fails_at = fails_at
    early.begin(2)
    assert early.step(has_forward=False) == {}
    early.gpu.run()
    assert early.step(has_forward=False)["l"].failed
    assert not early.stages.keys() & {"pass", "hidden", "waited"}


@pytest.mark.parametrize("num_there", range(LAYERS))
@pytest.mark.parametrize("what", ["weights", "sleep"])
def test_what_is_lost_meanwhile_fails_the_load(early: Early, num_there: int, what: str) -> None:
    """Other weights, or vLLM sleeps."""
    early.begin(num_there)
    early.gpu.is_eager = True  # whoever waits for copies finds them made
    early.worker.forget_segments() if what == "weights" else early.worker.release_caches()
    assert early.step(has_forward=False)["l"].failed
    assert not early.stages.keys() & {"pass", "hidden", "waited"}


@pytest.mark.parametrize("num_there", range(LAYERS))
def test_a_client_that_leaves_meanwhile_gets_its_blocks_back_when_nothing_writes_them(
    early: Early, num_there: int
) -> None:
    """Not before the last copy."""
    early.begin(num_there)
    assert early.step(has_forward=False, cancelled=("l",)) == {}
    early.gpu.run()
    assert not early.step(has_forward=False)["l"].failed


def test_a_load_that_fails_before_its_pass_has_none(early: Early) -> None:
    """It is reported as any other."""
    early.step(loads=(early.load,))
    early.copies.fail()
    early.gpu.run()
    assert early.step(has_forward=False)["l"].failed
    assert early.read == []


@pytest.mark.parametrize(
    "why_not", ["a forward pass", "not yet", "another load", "missing", "too many tokens"]
)
def test_a_pass_waits_for_all_of_its_load(early: Early, why_not: str) -> None:
    """Where others would wait for it, or it would wait; it is computed when everything is there."""
    if why_not == "another load":
        early.step(loads=(replace(early.load, request_id="m", block_ids=(7, 8, 9)),))
    if why_not == "missing":
        early.load = replace(early.load, copies=(*COPIES, WireCopy(SegmentId(9), 0, 1, 18, 18)))
    if why_not == "too many tokens":
        early.worker.parts.early._step_tokens = 5
    early.is_due = why_not != "not yet"
    early.step(loads=(early.load,))
    while early.copies.jobs:
        early.gpu.run()  # there is room for more
        early.copies.run()
    early.step(has_forward=why_not == "a forward pass")
    assert all(each.transfer.early is None for each in early.worker.parts.transfers._under_way.values())  # type: ignore[union-attr]


@pytest.mark.parametrize("is_right", [True, False])
def test_repairs_by_place_are_computed_with_the_placeholders(early: Early, *, is_right: bool) -> None:
    """In the same pass. They are reported unless the load fails."""
    from kvshare.sharing.plan import RepairOrder

    early.load = replace(early.load, order=RepairOrder((Span(0, 5),), (1,), 2))
    if not is_right:
        (stored,) = early.worker.attached.store.find([SegmentId(1)]).values()
        assert stored.sums is not None
        stored.sums[1, 0] ^= 1
    early.begin(LAYERS)
    early.gpu.run()
    result = early.step(has_forward=False)["l"]
    assert (result.failed, sum(map(len, result.repaired))) == (not is_right, 2 * is_right)
    assert [layer for layer, _ in early.read] == list(range(LAYERS))


def test_blocks_of_later_loads_are_written_after_the_pass(early: Early) -> None:
    """The load is reported when its copies are there, while the device may still compute."""

    from kvshare.vllm_connector.worker.gpu import Stream

    early.begin(LAYERS)
    early.gpu.run(Stream.UP, Stream.WRITE)
    assert not early.step(has_forward=False)["l"].failed
    early.step(loads=(replace(early.load, request_id="m"),))
    early.copies.run()
    early.cache.caches[0].zero_()
    early.gpu.run(Stream.UP, Stream.WRITE)
    assert not early.is_there(0), "the pass may read it still"
    early.gpu.run()
    assert early.is_there(0)


def test_ranks_begin_in_the_same_step_or_not_at_all(tmp_path: Path) -> None:
    """A wrong sum on one rank fails the load on both."""

    def work(rank: int) -> tuple[list[int], bool, frozenset[SegmentId]]:
        with one_rank():
            early = Early()
        (stored,) = early.worker.attached.store.find([SegmentId(1)]).values()
        assert stored.sums is not None
        stored.sums[0, 3] ^= rank
        early.is_due = rank == 0
        early.begin(2)
        counts = [len(early.read)]
        early.is_due = True
        early.step(has_forward=False)
        early.gpu.run()
        counts.append(len(early.read))
        result = early.step(has_forward=False)["l"]
        return counts, result.failed, result.unreadable

    assert on_two_ranks(tmp_path, work) == [([0, LAYERS], True, frozenset([SegmentId(1)]))] * 2


def test_copies_from_host_memory_do_not_wait_behind_copies_from_blocks(early: Early) -> None:
    """Those wait for the steps in flight, which may write what they copy."""
    from kvshare.vllm_connector.metadata import BlockSource
    from kvshare.vllm_connector.worker.gpu import Stream

    early.worker.parts.transfers.fence(range(10))
    early.gpu.run()
    copy = WireCopy(SegmentId(2), 0, NUM_TOKENS, 0, 0)
    other = replace(
        early.load,
        request_id="b",
        block_ids=(7, 8, 9),
        copies=(copy,),
        sources={copy: BlockSource((1, 2, 3), 0)},
    )
    for load in (other, early.load):
        early.step(loads=(load,))
        early.copies.run()
    early.gpu.run(Stream.UP, Stream.WRITE, Stream.BLOCKS)
    assert all(early.is_there(layer) for layer in range(LAYERS))
    early.gpu.run()
    assert early.step().keys() == {"b", "l"}
