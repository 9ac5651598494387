"""Loads that join a step, on one rank and on two. The real worker over a small cache."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId
from tests.kvshare.vllm_connector.worker.early_worker import LAYERS as EARLY_LAYERS
from tests.kvshare.vllm_connector.worker.early_worker import Early
from tests.kvshare.vllm_connector.worker.small_worker import NUM_TOKENS, late_copies, one_rank
from tests.kvshare.vllm_connector.worker.test_ranks import on_two_ranks
from tests.kvshare.vllm_connector.worker.test_steps import BLOCKS_OF, COPIES, Loads

if TYPE_CHECKING:
    from pathlib import Path

    from kvshare.vllm_connector.metadata import LoadRequest, LoadResult

OPEN = [5, 6, *range(16, 20)]  # what no copy covers


def load(name: str) -> LoadRequest:
    from kvshare.vllm_connector.metadata import LoadRequest

    return LoadRequest(
        name, BLOCKS_OF.get(name, (10, 11, 12)), 0, NUM_TOKENS, tuple(range(NUM_TOKENS)), COPIES
    )


def join(loads: Loads, *names: str, begins: bool = True) -> dict[str, LoadResult]:
    """What is reported of a step that these loads join, once its forward pass may begin."""
    from kvshare.vllm_connector.metadata import StepMetadata

    step = StepMetadata(loads=tuple(map(load, names)) if begins else (), joining=names)
    loads.worker.begin(step)
    passes = list(loads.passes)
    loads.worker.advance(step)
    assert loads.passes == passes, "nothing is computed after the forward pass"
    report, transfers = loads.worker.build_connector_worker_meta(), loads.worker.take_transfers()
    assert report is not None
    assert transfers.finished_recving == report.loads.keys() - set(names)
    return report.loads


def test_all_that_a_step_computes_is_one_pass() -> None:
    """Two loads that join it, and one that has arrived. Their copies are waited for."""
    from kvshare.vllm_connector.metadata import StepMetadata

    with one_rank():
        loads = Loads()
        loads.worker.begin(StepMetadata(loads=(load("c"),)))
        late_copies(loads.worker).run()
        assert join(loads, "a", "b").keys() == {"a", "b", "c"}
        (together,) = loads.passes
        assert len(together) == 3 * 2
        for name in "abc":
            assert loads.copied(load(name).block_ids) == [p for p in range(NUM_TOKENS) if p not in OPEN]


def test_one_that_was_announced_joins_a_later_step() -> None:
    """vLLM hears of it once."""
    from kvshare.vllm_connector.metadata import StepMetadata

    with one_rank():
        loads = Loads()
        step = StepMetadata(loads=(load("a"),), arriving=("a",))
        loads.worker.begin(step)
        loads.worker.advance(step)
        report = loads.worker.build_connector_worker_meta()
        assert report is not None
        assert (report.arriving, report.loads) == ({"a"}, {})
        assert loads.worker.take_transfers().finished_recving == {"a"}
        assert join(loads, "a", begins=False).keys() == {"a"}
        assert loads.computed() == [OPEN]


@pytest.mark.parametrize("fails", [1, 2])
def test_a_pass_that_fails_is_made_again_over_all_of_the_prompt(fails: int) -> None:
    """Once: vLLM computes with the blocks next, and must not if nothing is right in them."""
    with one_rank():
        loads = Loads()
        compute, left = loads.worker.attached.forward.compute, [fails]

        def failing(*given: Any, **options: Any) -> None:
            left[0] -= 1
            if left[0] >= 0:
                raise RuntimeError("out of memory")
            compute(*given, **options)

        loads.worker.attached.forward.compute = failing  # type: ignore[method-assign]
        if fails == 2:
            with pytest.raises(RuntimeError, match="out of memory"):
                join(loads, "a")
            return
        assert join(loads, "a")["a"].failed
        assert loads.computed() == [list(range(NUM_TOKENS))]


def test_what_one_rank_cannot_read_no_rank_uses(tmp_path: Path) -> None:
    """Both compute the same, or they would wait for each other in the pass."""

    def work(rank: int) -> tuple[list[list[int]], frozenset[SegmentId]]:
        with one_rank():
            loads = Loads()
        (stored,) = loads.worker.attached.store.find([SegmentId(1)]).values()
        assert stored.sums is not None
        stored.sums[0, 0] ^= rank
        unreadable = join(loads, "a")["a"].unreadable
        return loads.computed(), unreadable

    whole = [list(range(NUM_TOKENS))]
    assert on_two_ranks(tmp_path, work) == [(whole, frozenset([SegmentId(1)]))] * 2


def from_blocks() -> tuple[Any, LoadRequest]:
    """A worker on a GPU that works when the test says, and a load of what lies in the blocks 1 to 3."""
    from kvshare.vllm_connector.metadata import BlockSource

    early = Early()
    first, second = early.load.copies
    sources = {first: BlockSource((1,), 0), second: BlockSource((1, 2), 7)}
    return early, replace(early.load, sources=sources)


def test_a_pass_over_copies_from_blocks_is_launched_before_they_are_made() -> None:
    """The device waits for them, the host does not. Their time is reported when it is known."""
    from kvshare.vllm_connector.worker.gpu import Stream

    with one_rank():
        early, load = from_blocks()
        results = early.step(loads=(load,), joining=("l",))
        assert (results["l"].failed, results["l"].late_s) == (False, 0.0)
        early.gpu.run(Stream.VLLM)
        assert early.read == []
        assert "blocks" not in early.stages
        early.gpu.run()
        assert early.read == [(layer, True) for layer in range(EARLY_LAYERS)]
        early.step()
        assert "blocks" in early.stages


def test_what_it_copies_from_is_not_written_before() -> None:
    """The scheduler unpins these blocks once the load is reported."""
    with one_rank():
        early, load = from_blocks()
        early.step(loads=(load,), joining=("l",))
        mark = early.worker.parts.transfers._fences.mark_for([2])
        assert not early.gpu.is_past(mark)
        early.gpu.run()
        assert early.gpu.is_past(mark)


def test_copies_from_blocks_that_cannot_be_launched_are_computed() -> None:
    """In the step that the load joins."""
    from kvshare.vllm_connector.metadata import StepMetadata

    def failing(*_: object) -> None:
        raise RuntimeError("out of memory")

    with one_rank():
        early, load = from_blocks()
        early.gpu.copy_blocks = failing
        early.worker.begin(StepMetadata(loads=(load,), joining=("l",)))
        early.gpu.run()
        assert [layer for layer, _ in early.read] == [*range(EARLY_LAYERS)]
        report = early.worker.build_connector_worker_meta()
        assert report is not None
        assert report.loads["l"].failed
