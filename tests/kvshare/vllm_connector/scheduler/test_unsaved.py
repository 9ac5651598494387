"""What is retained while others wait: it stays in vLLM's blocks, and is saved later or lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import Dropped, FinishedReport, Prefilled, WireCopy
from kvshare.vllm_protocol.stages import SAVE
from tests.kvshare.vllm_connector.scheduler.scheduled_memory import ScheduledMemory

DONOR, SIZE = 38, 4  # tokens; of a block


@pytest.fixture
def memory() -> Iterator[ScheduledMemory]:
    memory = ScheduledMemory(copies_blocks=True)
    yield memory
    memory.vllm.shutdown()


def events(memory: ScheduledMemory, kind: type[Any]) -> list[Any]:
    return [event for event in memory.ours.events.read(0).events if isinstance(event, kind)]


def report(memory: ScheduledMemory, name: str = "donor") -> Any:
    (found,) = (each for each in events(memory, FinishedReport) if each.ticket_id == name)
    return found


def send_donor(memory: ScheduledMemory, *, max_tokens: int, num_others: int = 3) -> None:
    """And others, for which the pool has no room."""
    memory.send("donor", list(range(DONOR)), (), max_tokens=max_tokens)
    for number in range(num_others):
        memory.send(f"other {number}", [60 + number] * 76, (), max_tokens=2)


def send_near(memory: ScheduledMemory, name: str = "near") -> None:
    """A prompt that has all of the donor's, two positions later."""
    stored = events(memory, Prefilled)[0].stored
    copies = tuple(WireCopy(each.segment_id, 0, each.length, each.start + 2, each.start) for each in stored)
    memory.send(name, [90] * (DONOR + 6), copies, max_tokens=2)


def finish(memory: ScheduledMemory, *names: str) -> None:
    """Until these requests have ended, or all and nothing is left to be saved."""
    for _ in range(300):
        for name in list(memory.loading):
            memory.end_load(name, fails=False)
        memory.step()
        if names and all(request.is_finished() for request in memory.sent if request.request_id in names):
            return
        if not memory.vllm.has_requests():
            return
    raise AssertionError("it never ends")


def test_a_prompt_is_a_donor_in_the_step_after_its_prefill(memory: ScheduledMemory) -> None:
    """Before any save: others copy from its blocks, but for the one that is not full."""
    send_donor(memory, max_tokens=30)
    memory.step()
    memory.step()
    (prefilled,) = events(memory, Prefilled)
    assert sum(segment.length for segment in prefilled.stored) == DONOR - DONOR % SIZE
    assert not memory.saving
    assert not memory.saving_late


def test_no_block_is_kept_after_the_request(memory: ScheduledMemory) -> None:
    """Others get them in the next step; the answer's full blocks are retained."""
    send_donor(memory, max_tokens=4)
    while "donor" in memory.vllm.requests:
        memory.step()
    assert "donor" not in memory.holders()
    assert not memory.saving
    assert not memory.saving_late
    finished = report(memory)
    num_retained = sum(segment.length for segment in finished.stored)
    assert num_retained == DONOR + len(finished.output_ids) == 40


@pytest.mark.parametrize("num_used", [3, 15])
def test_no_block_is_kept_where_few_are_free(memory: ScheduledMemory, num_used: int) -> None:
    """Although no request waits: of 37 blocks the donor has 11, and another request these."""
    memory.send("runner", [60] * 4 * num_used, (), max_tokens=20)
    memory.step()
    memory.step()
    memory.send("donor", list(range(DONOR)), (), max_tokens=4)
    while not memory.sent[-1].is_finished():
        memory.step()
    assert ("donor" in memory.holders()) == (num_used == 3) == (len(memory.ours.unsaved) == 0)
    finish(memory)
    assert len(memory.ours.unsaved) == 0
    assert sum(segment.length for segment in report(memory).stored) in (40, 41)


def test_what_is_unsaved_is_copied_from_its_blocks(memory: ScheduledMemory) -> None:
    """Also when its request has ended; `ScheduledMemory` compares what is read."""
    send_donor(memory, max_tokens=4, num_others=1)
    memory.send("waiting", [80] * 76, (), max_tokens=2)
    finish(memory, "donor")
    assert len(memory.ours.unsaved) > 0
    send_near(memory)
    for _ in range(6):
        memory.step()
    assert memory.num_from_blocks == 1


def test_what_is_given_away_before_it_is_saved_is_dropped(memory: ScheduledMemory) -> None:
    """The proxy is informed, and a plan that it was part of is computed."""
    send_donor(memory, max_tokens=4, num_others=4)
    while not events(memory, Prefilled):
        memory.step()
    send_near(memory)
    finish(memory)
    gone = {segment_id for event in events(memory, Dropped) for segment_id in event.segment_ids}
    assert {segment.segment_id for segment in report(memory).stored} <= gone
    assert (report(memory, "near").decision, report(memory, "near").reason) == ("full", "segments_gone")


def test_an_idle_vllm_saves_what_is_left(memory: ScheduledMemory) -> None:
    """Its steps go on until that is done."""
    send_donor(memory, max_tokens=4, num_others=2)
    finish(memory)
    assert len(memory.ours.unsaved) == 0
    assert memory.num_saved_late > 0
    assert memory.vllm.reset_prefix_cache()


def test_a_save_keeps_no_block(memory: ScheduledMemory) -> None:
    """What is given away while it is saved is dropped, not stored."""
    send_donor(memory, max_tokens=4, num_others=2)
    while not memory.saving_late:
        memory.step()
    (saving,) = {segment_id for save in memory.saving_late.values() for segment_id, _ in save.spans}
    assert memory.vllm.reset_prefix_cache() == (not memory.holders())
    memory.pool.evict_blocks(set(memory.ours.donors.block_ids(saving)))
    memory.step()
    assert saving not in memory.ours.segments
    assert saving in {each for event in events(memory, Dropped) for each in event.segment_ids}


@pytest.mark.parametrize("fails", [True, False])
def test_a_save_that_fails_is_dropped(memory: ScheduledMemory, fails: bool) -> None:
    """As one of a request would be."""
    send_donor(memory, max_tokens=4, num_others=2)
    while not memory.saving_late:
        memory.step()
    (name,) = memory.saving_late
    (segment_id,) = memory.ours.unsaved._saving.values()
    memory.ours.donors.renew([segment_id])  # given away last
    memory.report.failed_saves = {name} if fails else set()
    memory.step()
    assert (segment_id in memory.ours.segments) == (not fails)


def test_only_what_is_copied_is_saved_while_others_wait_for_loads(memory: ScheduledMemory) -> None:
    """Once its blocks are among the next ones to be given away."""
    send_donor(memory, max_tokens=4, num_others=2)
    finish(memory, "donor", "other 0", "other 1")
    memory.ours._waiting.admit("loading", loads=True)
    assert len(memory.ours.unsaved) > 1
    unsaved = memory.ours.unsaved
    assert list(unsaved.take_due()) == []
    used = next(iter(unsaved._ids))
    unsaved.note_use([used])
    pool = memory.pool
    leaving = set(memory.ours.donors.block_ids(used)) & memory.ours.donors.next_given_away(9)
    due = [segment_id for save in unsaved.take_due() for segment_id, _ in save.spans]
    assert due == ([used] if leaving else [])
    assert pool.get_num_free_blocks() > 0


@pytest.mark.parametrize(("seconds", "is_long"), [(0.01, False), (10.0, True)])
def test_no_block_is_kept_for_a_save_that_takes_long(
    memory: ScheduledMemory, seconds: float, is_long: bool
) -> None:
    """Although no request waits and most blocks are free: the next one to come may need them."""
    from kvshare.vllm_connector.metadata import SaveRequest, WorkerReport

    pace = memory.ours.saving.pace
    pace.begin([SaveRequest("before", (), ((SegmentId(1), Span(0, 128)),))])
    pace.note(WorkerReport(stage_seconds={"before": {SAVE: seconds * 128 / DONOR}}))
    send_donor(memory, max_tokens=4, num_others=0)
    while not memory.sent[-1].is_finished():
        memory.step()
    assert ("donor" in memory.holders()) != is_long
    finish(memory)
    assert (memory.num_saved_late > 0) == is_long
    assert sum(segment.length for segment in report(memory).stored) in (40, 41)
