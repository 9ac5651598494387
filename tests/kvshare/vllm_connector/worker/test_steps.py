"""What a step computes of the loads that have arrived. The real worker over a small cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.worker.small_worker import (
    NUM_TOKENS,
    late_copies,
    new_worker,
    one_rank,
)

if TYPE_CHECKING:
    from kvshare.vllm_connector.worker.partial_forward import Run


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
