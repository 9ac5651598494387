"""Reads from disk for requests that wait in vLLM's queue: what is read, for how long, and what it teaches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId
from kvshare.vllm_protocol.messages import WireCopy
from tests.kvshare.vllm_connector.scheduler.one_segment import new_request, new_scheduler

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import StepMetadata
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler

BYTES = 100_000  # of a segment on disk; memory has room for ten, and for two that are read ahead
FIRST, SECOND, THIRD = SegmentId(11), SegmentId(12), SegmentId(13)


@pytest.fixture
def scheduler() -> ConnectorScheduler:
    """Three segments on disk, and another one in memory only."""
    from kvshare.vllm_connector.scheduler.segment_index import HeldSegment

    scheduler = new_scheduler()
    scheduler.disk.begin(())
    scheduler.segments.disk.max_bytes = 10**9
    for segment_id in (FIRST, SECOND, THIRD):
        scheduler.segments.disk.add(segment_id, HeldSegment("namespace", 200, BYTES))
    return scheduler


def arrived(scheduler: ConnectorScheduler, name: str, *segment_ids: SegmentId) -> Any:
    """A request that vLLM does not admit yet."""
    copies = [WireCopy(each, 0, 50, 60 * place, 0) for place, each in enumerate(segment_ids)]
    request: Any = new_request(f"ticket {name}", *copies, request_id=name)
    scheduler.on_new_request(request)
    return request


def step(scheduler: ConnectorScheduler) -> StepMetadata:
    empty: Any = SimpleNamespace(
        num_scheduled_tokens={}, preempted_req_ids=None, total_num_scheduled_tokens=0
    )
    return scheduler.build_connector_meta(empty)


def begun(made: StepMetadata) -> list[tuple[str, tuple[SegmentId, ...]]]:
    return [(each.request_id, each.segment_ids) for each in made.preloads.begun]


def admit(scheduler: ConnectorScheduler, request: Any) -> StepMetadata:
    found, _ = scheduler.get_num_new_matched_tokens(request, 0)
    assert found
    scheduler.update_state_after_alloc(request, [1, 2], found)
    return step(scheduler)


def test_what_a_waiting_request_needs_is_read_once(scheduler: ConnectorScheduler) -> None:
    """In the first step that passes it over. It counts as in memory, and its load as one that reads."""
    request = arrived(scheduler, "a", FIRST, SECOND)
    assert begun(step(scheduler)) == [("a", (FIRST, SECOND))]
    assert begun(step(scheduler)) == []
    assert scheduler.segments.only_on_disk([FIRST, SECOND]) == []
    made = admit(scheduler, request)
    assert made.preloads.over == ("a",)
    assert made.loads[0].reads_within_s > 0
    assert scheduler._requests["a"].disk_bytes == 0, "how fast it was is not known"


def test_a_request_that_gets_blocks_at_once_reads_with_its_load(scheduler: ConnectorScheduler) -> None:
    made = admit(scheduler, arrived(scheduler, "a", FIRST))
    assert (begun(made), made.preloads.over) == ([], ())
    assert scheduler._requests["a"].disk_bytes == BYTES


def test_a_request_that_ends_while_it_waits_leaves_nothing(scheduler: ConnectorScheduler) -> None:
    """But what another one waits for."""
    for name, wanted in (("a", (FIRST, SECOND)), ("b", (SECOND,))):
        request = arrived(scheduler, name, *wanted)
        step(scheduler)
        if name == "a":
            first = request
    scheduler.request_finished(first, [])
    made = step(scheduler)
    assert made.preloads.over == ("a",)
    assert FIRST in made.evictions
    assert scheduler.segments.only_on_disk([FIRST, SECOND]) in ([FIRST], [FIRST, SECOND])
    assert FIRST in scheduler.segments, "it is on disk"


def test_those_that_wait_take_a_part_of_memory_in_turn(scheduler: ConnectorScheduler) -> None:
    """The next one is read when one before it has got its blocks."""
    request = arrived(scheduler, "a", FIRST, SECOND)
    arrived(scheduler, "b", THIRD)
    assert begun(step(scheduler)) == [("a", (FIRST, SECOND))]
    assert begun(step(scheduler)) == []
    scheduler.request_finished(request, [])
    assert begun(step(scheduler)) == [("b", (THIRD,))]


def test_nothing_leaves_for_them_that_only_memory_has(scheduler: ConnectorScheduler) -> None:
    """A guess must not cost what cannot be read again."""
    from kvshare.vllm_connector.scheduler.segment_index import HeldSegment

    scheduler.segments.add(SegmentId(99), HeldSegment("namespace", 200, 950_000))
    arrived(scheduler, "a", FIRST)
    assert begun(step(scheduler)) == []
    assert SegmentId(99) in scheduler.segments
