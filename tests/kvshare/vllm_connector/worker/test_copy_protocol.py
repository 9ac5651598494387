"""
Copies next to vLLM's steps, whenever they happen: the machine of `copy_protocol.py`, driven at random and to
single points.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

from delta_tree import SegmentId, Span
from tests.kvshare.vllm_connector.worker.copy_protocol import Protocol
from tests.kvshare.vllm_connector.worker.small_worker import MIXED, late_copies, new_worker, one_rank


class OfMixedLayers(Protocol):
    """Layers that differ in KV heads and head size are copied part by part."""

    shapes = MIXED


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("machine", "max_examples"), [(Protocol, 60), (OfMixedLayers, 30)])
def test_whatever_comes_whenever_it_is_copied(machine: type[Protocol], max_examples: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_what_is_preempted_was_copied_before_its_blocks_are_given_away() -> None:
    machine = Protocol()
    machine.start()
    machine.save(ends=False)
    machine.run_step()
    machine.step["preempted"].add("s1")
    machine.run_step()
    assert not machine.copies.jobs
    machine.run_step()
    assert machine.segments == {SegmentId(1): 1.0}
    machine.every_segment_is_what_was_saved()
    machine.teardown()


def test_a_segment_that_leaves_is_read_before_its_bytes_are_taken() -> None:
    """The next prompt takes its place in the arena while a load of it waits to be copied."""
    machine = Protocol()
    machine.start()
    for _ in range(4):
        machine.save(ends=True)
    machine.copy_everything()
    segment_id = min(machine.segments)
    machine.begin_load(segment_id, has_hole=False)
    machine.step["drops"].append(segment_id)
    del machine.segments[segment_id]
    machine.save(ends=True)
    machine.teardown()


def test_a_save_waits_for_memory_that_a_load_still_reads() -> None:
    """It is whole at last, as are all that come after it; nothing fails."""
    machine = Protocol()
    machine.start()
    for _ in range(4):
        machine.save(ends=True)
    machine.copy_everything()
    segment_id = min(machine.segments)
    machine.begin_load(segment_id, has_hole=False)
    machine.step["drops"].append(segment_id)
    del machine.segments[segment_id]
    machine.save(ends=True)
    machine.run_step()
    assert [save.request.request_id for save in machine.worker.parts.transfers._without_room] == ["s6"]
    machine.copy_everything()
    assert {SegmentId(6)} <= machine.segments.keys()
    machine.teardown()


@pytest.mark.parametrize("what", ["preempted", "asleep", "forgotten"])
def test_a_save_that_waits_for_memory_is_reported_when_its_blocks_are_lost(what: str) -> None:
    """As failed."""
    machine = Protocol()
    machine.start()
    for _ in range(4):
        machine.save(ends=True)
    machine.copy_everything()
    segment_id = min(machine.segments)
    machine.begin_load(segment_id, has_hole=False)
    machine.step["drops"].append(segment_id)
    del machine.segments[segment_id]
    machine.save(ends=what != "preempted")
    machine.run_step()
    assert machine.saving.keys() == {"s6"}
    if what == "preempted":
        machine.step["preempted"].add("s6")
    elif what == "asleep":
        machine.sleep(runs_step=False)
    else:
        machine.copies.failed += machine.loading
        machine.worker.forget_segments()
        machine.segments.clear()
    machine.run_step()
    assert not machine.saving
    machine.teardown()


def test_saves_of_a_request_end_in_order() -> None:
    """The last one ends the request: those of its prompt are reported before, whichever is copied first."""
    from kvshare.vllm_connector.metadata import SaveRequest, StepMetadata

    with one_rank():
        worker = new_worker(max_segments=4)
        copies = late_copies(worker)
        for number, ends in enumerate((False, True)):
            spans = ((SegmentId(number), Span(10 * number, 10 * number + 10)),)
            worker.save(StepMetadata(saves=(SaveRequest("s", (1, 2, 3), spans, ends),)))
        copies.hurry(copies.jobs[1])
        copies.run()
        worker.advance(StepMetadata())
        assert not worker.take_transfers().finished_sending
        copies.run()
        worker.advance(StepMetadata())
        report = worker.build_connector_worker_meta()
        assert report is not None
        assert report.saved_prompts == worker.take_transfers().finished_sending == {"s"}
