"""What a step computes of the loads that have arrived. The real worker over a small cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId, Span
from kvshare.sharing.plan import RepairOrder
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.worker.small_worker import (
    DIM,
    HEADS,
    LAYERS,
    NUM_TOKENS,
    late_copies,
    late_device,
    new_worker,
    one_rank,
    use,
)
from tests.kvshare.vllm_connector.worker.test_ranks import on_two_ranks

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import LoadRequest, LoadResult
    from kvshare.vllm_connector.worker.device import Device
    from kvshare.vllm_connector.worker.runs import Run

VALUE = 7.0
PROBES = (1, 8)
CHOOSES = RepairOrder((Span(0, 5), Span(7, 16)), PROBES, 4)
COPIES = (WireCopy(SegmentId(1), 0, 5, 0, 0), WireCopy(SegmentId(1), 7, 9, 7, 7))
FIRST = {1, 5, 6, 8, *range(16, 20)}  # two probes, and six tokens that nobody has


def test_fifty_planned_arrivals_are_computed_over_steps_in_their_order() -> None:
    """
    Whatever is copied by when, no step computes more than two loads' 10 tokens, and nobody starves.

    Blocks are shared: each load computes the same rows in them.
    """
    from kvshare.vllm_connector.metadata import LoadRequest, SaveRequest, StepMetadata

    with one_rank():
        worker, computed = new_worker(1), list[int]()
        placeholders, forward = worker.parts.placeholders, worker.attached.forward
        placeholders._step_tokens = 10
        compute = forward.compute

        def counted(runs: Sequence[Run], **options: Any) -> None:
            computed.append(sum(len(run.span) for run in runs))
            compute(runs, **options)

        forward.compute = counted  # type: ignore[method-assign]
        copies = late_copies(worker)
        spans = ((SegmentId(1), Span(0, NUM_TOKENS)),)
        worker.save(StepMetadata(saves=(SaveRequest("s", (1, 2, 3), spans),)))
        copies.run()
        piece = (WireCopy(SegmentId(1), 5, NUM_TOKENS - 5, 5, 5),)
        names = [f"l{number}" for number in range(50)]
        tokens = tuple(range(NUM_TOKENS))
        step = StepMetadata(
            loads=tuple(LoadRequest(name, (4, 5, 6), 0, NUM_TOKENS, tokens, piece) for name in names)
        )
        reported = list[list[str]]()
        worker.begin(step)
        while sum(map(len, reported)) < 50:
            for _ in range(min(3, len(copies.jobs))):  # more arrive than a step computes
                copies.run()
            worker.advance(StepMetadata())
            transfers = worker.take_transfers()
            assert not transfers.failed_recving
            reported.append(sorted(transfers.finished_recving, key=names.index))
            assert reported[-1], "each step computes something"
    assert [name for each in reported for name in each] == names
    assert computed == [10] * 25


class Loads:
    """A worker that has one segment stored, and what it computes of loads, step by step."""

    def __init__(
        self, device: Device | None = None, *, can_listen: bool = True, step_tokens: int = 100
    ) -> None:
        import torch

        from kvshare.vllm_connector.metadata import SaveRequest, StepMetadata

        self.worker = new_worker(2)
        use(self.worker, self.worker.attached, can_listen=can_listen)
        self.cache, placeholders = self.worker.attached.cache, self.worker.parts.placeholders
        placeholders._step_tokens = step_tokens
        if device is not None:
            placeholders._device = device
        self.passes = list[list[Span]]()
        compute = self.worker.attached.forward.compute

        def noted(runs: Sequence[Run], **options: Any) -> None:
            self.passes.append([run.span for run in runs])
            compute(runs, **options)

        self.worker.attached.forward.compute = noted  # type: ignore[method-assign]
        rows = torch.full((LAYERS, NUM_TOKENS, HEADS, DIM), VALUE)
        self.cache.write(rows, -rows, self.cache.slots((1, 2, 3), Span(0, NUM_TOKENS)))
        spans = ((SegmentId(1), Span(0, NUM_TOKENS)),)
        self.worker.save(StepMetadata(saves=(SaveRequest("s", (1, 2, 3), spans),)))
        late_copies(self.worker).run()
        self.step()
        self.worker.take_transfers()

    def step(self, *loads: LoadRequest, **own: Any) -> dict[str, LoadResult]:
        """What it reports of loads."""
        from kvshare.vllm_connector.metadata import StepMetadata

        made = StepMetadata(loads=loads, **own)
        self.worker.begin(made)
        while late_copies(self.worker).jobs:
            late_copies(self.worker).run()
        self.worker.advance(made)
        report, transfers = self.worker.build_connector_worker_meta(), self.worker.take_transfers()
        results = {} if report is None else dict(report.loads)
        assert transfers.finished_recving == set(results)
        assert transfers.failed_recving == {name for name, result in results.items() if result.failed}
        return results

    def computed(self) -> list[list[int]]:
        """The positions of each pass since the last call."""
        passes, self.passes = self.passes, []
        return [sorted(p for span in spans for p in range(span.start, span.end)) for spans in passes]

    def copied(self, blocks: tuple[int, ...]) -> list[int]:
        """The positions whose rows are the stored segment's."""
        keys = self.cache.read(blocks, Span(0, NUM_TOKENS)).k
        return [p for p in range(NUM_TOKENS) if (keys[:, p] == VALUE).all()]


BLOCKS_OF = {"a": (4, 5, 6), "b": (7, 8, 9)}


def load(
    name: str = "a", order: RepairOrder | None = CHOOSES, copies: tuple[WireCopy, ...] = COPIES
) -> LoadRequest:
    from kvshare.vllm_connector.metadata import LoadRequest

    tokens = tuple(range(NUM_TOKENS))
    return LoadRequest(name, BLOCKS_OF[name], 0, NUM_TOKENS, tokens, copies, order)


def places(spans: Sequence[Span]) -> list[int]:
    return [place for span in spans for place in range(span.start, span.end)]


@pytest.fixture
def single_rank() -> Iterator[None]:
    with one_rank():
        yield


@pytest.mark.usefixtures("single_rank")
class TestChoosing:
    """Repairs are chosen between two passes, of which the second waits for results of the first."""

    def test_both_passes_are_in_one_step_where_results_are_there_at_once(self) -> None:
        loads = Loads()
        result = loads.step(load())["a"]
        first, second = loads.computed()
        assert set(first) == FIRST
        assert set(second) == {*places(result.repaired), 5, 6, *range(16, 20)}
        assert len(places(result.repaired)) == 4
        assert loads.copied(BLOCKS_OF["a"]) == sorted({*range(20)} - set(second))

    def test_the_second_is_in_the_step_in_which_results_have_arrived(self) -> None:
        """Until then nothing is computed, nothing is reported, and no step waits."""
        loads = Loads(device := late_device())
        assert [loads.step(load()), loads.step(), loads.step()] == [{}, {}, {}]
        assert list(map(set, loads.computed())) == [FIRST]
        device.has_arrived = True
        result = loads.step()["a"]
        assert loads.computed() == [sorted({*places(result.repaired), 5, 6, *range(16, 20)})]
        assert result == Loads().step(load())["a"]
        assert loads.step() == {}

    def test_probes_are_restored_before_another_step(self) -> None:
        """Whoever reads the rows meanwhile finds what was copied: a probe is no repair."""
        loads = Loads(late_device())
        loads.step(load())
        assert loads.copied(BLOCKS_OF["a"]) == [*range(5), *range(7, 16)]

    def test_meanwhile_others_have_their_turn_and_passes_of_a_step_are_one(self) -> None:
        loads = Loads(device := late_device())
        loads.step(load("a"))
        assert set(loads.step(load("b", None))) == {"b"}
        loads.computed()
        device.has_arrived = True
        assert set(loads.step(load("b"))) == {"a"}
        (together,) = loads.computed()
        assert len(together) == 10 + len(FIRST)
        assert set(loads.step()) == {"b"}

    @pytest.mark.parametrize("what", ["cancel", "sleep", "new weights"])
    def test_what_ends_a_load_between_the_passes(self, what: str) -> None:
        """It is reported once, nothing more is computed for it, and late results are nobody's."""
        loads = Loads(device := late_device())
        loads.step(load())
        loads.computed()
        if what == "cancel":
            result = loads.step(cancelled=("a",))["a"]
        else:
            if what == "sleep":
                loads.worker.release_caches()
                loads.worker.restore_caches()
            else:
                loads.worker.forget_segments()
            result = loads.step()["a"]
        assert (result.failed, result.repaired) == (what != "cancel", ())
        device.has_arrived = True
        assert [loads.step(), loads.step()] == [{}, {}]
        assert loads.computed() == []

    def test_a_choice_that_fails_fails_its_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvshare.vllm_connector.worker import choosing

        loads = Loads(device := late_device())
        loads.step(load("a"))
        device.has_arrived = True
        with monkeypatch.context() as patch:
            patch.setattr(choosing, "choose", None)
            results = loads.step(load("b", None))
        assert {name: result.failed for name, result in results.items()} == {"a": True, "b": False}

    @pytest.mark.parametrize("is_late", [False, True])
    def test_a_second_pass_that_is_larger_than_a_step_takes_several(self, is_late: bool) -> None:
        """No step computes more than it may; others wait, and the rows are the same."""
        loads = Loads(late_device(arrives=(1,)) if is_late else None, step_tokens=3)
        results, steps = loads.step(load("a"), load("b", None)), 1
        while len(results) < 2:
            results.update(loads.step())
            steps += 1
        assert list(results) == ["a", "b"]
        passes = loads.computed()
        assert max(map(len, passes)) <= 3
        assert sum(map(len, passes)) == len(FIRST) + 10 + 6
        whole = Loads()
        assert whole.step(load("a"))["a"] == results["a"]
        assert loads.copied(BLOCKS_OF["a"]) == whole.copied(BLOCKS_OF["a"])

    def test_a_step_counts_a_second_pass_that_follows_in_it(self) -> None:
        """Of two loads whose first passes fit together only one is computed, as its repairs are, too."""
        loads = Loads(step_tokens=2 * len(FIRST) + 4)
        assert set(loads.step(load("a"), load("b"))) == {"a"}
        assert set(loads.step()) == {"b"}

    def test_repairs_by_place_are_computed_with_the_placeholders(self) -> None:
        """There is nothing to read before."""
        loads = Loads(late_device(), can_listen=False)
        result = loads.step(load())["a"]
        (only,) = loads.computed()
        assert set(only) == {5, 6, *range(16, 20), *places(result.repaired)}
        assert len(places(result.repaired)) == 4

    def test_where_nothing_is_repaired_the_first_pass_stands(self) -> None:
        """All that repairs might have been chosen from is computed, as it is not there any more."""
        gone = tuple(copy._replace(segment_id=SegmentId(9)) for copy in COPIES)
        loads = Loads()
        result = loads.step(load(copies=gone))["a"]
        assert result.repaired == ()
        assert loads.computed() == [list(range(NUM_TOKENS))]

    def test_a_step_without_a_forward_pass_waits_a_little_for_results(self) -> None:
        device = late_device(arrives=(3,))
        loads = Loads(device)
        loads.step(load(), has_forward=False)
        assert set(loads.step(has_forward=False)) == {"a"}

    def test_it_does_not_wait_for_ever(self) -> None:
        loads = Loads(late_device())
        loads.step(load())
        assert loads.step(has_forward=False) == {}


def test_all_ranks_begin_a_second_pass_in_the_same_step(tmp_path: Path) -> None:
    """A pass has collectives. Both have copied at once, and the results of one are late."""

    def work(rank: int) -> list[list[list[int]]]:
        loads = Loads(late_device(arrives=(4,) if rank else (1,)))
        loads.step(load())
        steps = [loads.computed()]
        for _ in range(7):
            loads.step()
            steps.append(loads.computed())
        return steps

    first, second = on_two_ranks(tmp_path, work)
    assert first == second
    assert [len(passes) for passes in first] == [0, 1, 0, 0, 0, 1, 0, 0]
