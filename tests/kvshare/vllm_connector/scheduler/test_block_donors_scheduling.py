"""Copies from blocks in vLLM's real scheduler: what its other requests notice of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvshare.vllm_protocol.messages import FinishedReport, WireCopy
from tests.kvshare.vllm_connector.scheduler.scheduled_memory import ScheduledMemory

DONOR = 40  # tokens


@pytest.fixture
def memory() -> Iterator[ScheduledMemory]:
    """A donor has ended, and a long answer is being generated."""
    memory = ScheduledMemory(copies_blocks=True)
    memory.send("donor", list(range(DONOR)), (), max_tokens=2)
    while memory.vllm.has_requests():
        memory.step()
    memory.send("runner", [50] * 40, (), max_tokens=28)
    memory.step()
    yield memory
    memory.vllm.shutdown()


def begin_load(memory: ScheduledMemory, name: str = "near", *, tail: int = 2) -> None:
    """Of a prompt that has all of the donor's, and so many tokens after them."""
    reports = (e for e in memory.ours.events.read(0).events if isinstance(e, FinishedReport))
    stored = [segment for segment in next(reports).stored if segment.start < DONOR]
    copies = tuple(WireCopy(each.segment_id, 0, each.length, each.start + 2, each.start) for each in stored)
    memory.send(name, [60] * (2 + DONOR + tail), copies, max_tokens=2)
    memory.step()
    assert memory.reading == {name}
    assert len(memory.held_for_copies()) == DONOR // 4


def test_a_running_request_waits_for_copies_and_is_not_preempted(memory: ScheduledMemory) -> None:
    """Blocks of the donor are free when its copies are made; the pool has no others."""
    runner = memory.vllm.requests["runner"]
    begin_load(memory)
    for _ in range(40):
        memory.step()
    assert (memory.num_waits > 0, runner.num_preemptions, runner.is_finished()) == (True, 0, False)
    num_before = runner.num_output_tokens
    memory.end_copies("near")
    memory.step()
    assert not memory.held_for_copies()
    assert "near" in memory.loading  # what no copy covers is being computed
    for _ in range(40):
        memory.step()
    assert num_before < runner.num_output_tokens == 28
    assert runner.num_preemptions == 0


def test_what_waits_for_the_blocks_of_an_announced_load_gets_them(memory: ScheduledMemory) -> None:
    """Its copies keep them, and end in the step that it joins: one without tokens, as no block is left."""
    runner = memory.vllm.requests["runner"]
    begin_load(memory, tail=12)  # which needs a block, too
    while not memory.num_waits:
        memory.step()
    memory.announce("near")
    for _ in range(40):
        memory.step()
    assert memory.joined == {"near"}
    assert runner.is_finished()
    assert runner.num_preemptions == 0


def test_a_donor_outlives_the_requests_that_copy_from_it(memory: ScheduledMemory) -> None:
    """Their own blocks, which no other request can use, are given away before."""
    from vllm.v1.request import RequestStatus

    memory.vllm.finish_requests("runner", RequestStatus.FINISHED_ABORTED)
    for number in range(8):
        begin_load(memory, f"near {number}")
        memory.end_load(f"near {number}", fails=False)
        while memory.vllm.has_requests():
            memory.step()
    assert memory.num_from_blocks == 8


@pytest.mark.parametrize("is_dropped", [False, True])
def test_rows_of_a_segment_that_is_dropped_are_not_kept(memory: ScheduledMemory, *, is_dropped: bool) -> None:
    """While the request that copied them prefills: nobody would forget them later."""
    reports = (e for e in memory.ours.events.read(0).events if isinstance(e, FinishedReport))
    stored = [segment for segment in next(reports).stored if segment.start < DONOR]
    copies = tuple(WireCopy(each.segment_id, 0, each.length, each.start, each.start) for each in stored)
    memory.send("near", list(range(DONOR)) + [60] * 4, copies, max_tokens=2)
    memory.step()
    if is_dropped:
        memory.ours.drop([each.segment_id for each in stored])
        memory.step()
    memory.end_load("near", fails=False)
    for _ in range(10):
        memory.step()
    assert bool(memory.ours.donors._copied._runs) == (not is_dropped)


@pytest.mark.parametrize("fails", [True, False])
def test_the_end_of_a_load_frees_what_it_read(memory: ScheduledMemory, fails: bool) -> None:
    """Also of one that was never reported as copied, because it failed."""
    begin_load(memory)
    memory.end_load("near", fails=fails)
    memory.step()
    assert not memory.held_for_copies()
    assert not memory.ours.donors.has_pinned


def test_an_aborted_load_reads_until_its_end(memory: ScheduledMemory) -> None:
    """Its copies are under way; vLLM keeps its own blocks as long."""
    from vllm.v1.request import RequestStatus

    begin_load(memory)
    memory.vllm.finish_requests("near", RequestStatus.FINISHED_ABORTED)
    memory.step()
    assert memory.held_for_copies()
    memory.end_load("near", fails=False)
    memory.step()
    assert not memory.held_for_copies()
