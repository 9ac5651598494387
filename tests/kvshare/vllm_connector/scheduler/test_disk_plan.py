"""What the scheduler side has written to disk."""

from __future__ import annotations

import pytest

from delta_tree import SegmentId
from kvshare.vllm_protocol.places import DiskProblem


def test_nothing_is_written_after_a_reset_of_the_cache(caplog: pytest.LogCaptureFixture) -> None:
    """Its weights may be others than those of the start, after which the files are named."""
    from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
    from kvshare.vllm_connector.scheduler.drops import Drops
    from kvshare.vllm_connector.scheduler.event_log import EventLog
    from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex

    segments, events = SegmentIndex(1000), EventLog()
    plan = DiskPlan(segments, Drops(segments, events), events)
    plan.begin(())
    for number in (1, 2):
        segments.add(SegmentId(number), HeldSegment("namespace", 10, 100, 0))
    plan.note_saved([SegmentId(1)])
    assert [each.segment_id for each in plan.take_writes()] == [SegmentId(1)]
    plan.note_saved([SegmentId(1)])
    with caplog.at_level("WARNING", logger="vllm.kvshare"):  # vLLM sets another one when it is imported
        plan.give_up()
        plan.note_saved([SegmentId(2)])
        assert plan.take_writes() == ()
        assert not plan.has_work
        plan.give_up()
    assert caplog.text.count("until vLLM is started again") == 1
    (event,) = events.read(0, wait_s=0).events
    assert event == plan.problem
    assert plan.problem.is_lasting


def test_a_disk_that_fails_and_works_again_is_told_once_each() -> None:
    """However many steps report it; what is written meanwhile is noted as ever."""
    from kvshare.vllm_connector.metadata import DiskReport, WorkerReport
    from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
    from kvshare.vllm_connector.scheduler.drops import Drops
    from kvshare.vllm_connector.scheduler.event_log import EventLog
    from kvshare.vllm_connector.scheduler.segment_index import SegmentIndex

    segments, events = SegmentIndex(1000), EventLog()
    plan = DiskPlan(segments, Drops(segments, events), events)
    plan.begin(())
    for problem in (None, "full", "full", None, None):
        plan.note(WorkerReport(disk=DiskReport((), problem)))
        plan.note(WorkerReport())
        assert plan.problem == DiskProblem(problem or "")
    assert events.read(0, wait_s=0).events == (DiskProblem("full"), DiskProblem(""))


def test_the_rate_of_a_late_disk_is_of_what_it_has_read() -> None:
    """Of its smallest segment if that was nothing, as nothing would teach nothing."""
    from kvshare.vllm_connector.metadata import LoadResult
    from kvshare.vllm_connector.scheduler.disk_plan import DiskPlan
    from kvshare.vllm_connector.scheduler.drops import Drops
    from kvshare.vllm_connector.scheduler.event_log import EventLog
    from kvshare.vllm_connector.scheduler.request_state import TicketedRequest
    from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex
    from kvshare.vllm_protocol.messages import Ticket

    segments, events = SegmentIndex(1000, max_disk_bytes=1000), EventLog()
    plan = DiskPlan(segments, Drops(segments, events), events)
    for number in (1, 2, 3):
        segments.disk.add(SegmentId(number), HeldSegment("namespace", 10, 100 * number, 0))
    for late, in_time in (((), 600), ((2,), 400), ((2, 3), 200), ((1, 2, 3), 100)):
        request = TicketedRequest(Ticket("t", "namespace", "", 100), None, is_first=True, disk_bytes=600)
        plan.note_bytes(request, LoadResult(late=frozenset(map(SegmentId, late))))
        assert (request.disk_bytes, request.late_bytes) == (in_time, 600 - in_time)
    request = TicketedRequest(Ticket("t", "namespace", "", 100), None, is_first=True)
    plan.note_bytes(request, LoadResult())
    assert (request.disk_bytes, request.late_bytes) == (0, 0)
