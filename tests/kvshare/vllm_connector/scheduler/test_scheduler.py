"""The scheduler side on vLLM's own request objects, without an engine: tickets, and reports of workers."""

from __future__ import annotations

import faulthandler
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import SegmentId, Span
from kvshare.vllm_protocol.messages import TICKET_KEY, Finished, Ticket, WireCopy, digest_of
from kvshare.vllm_protocol.salts import private_salt

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler

TOKENS = list(range(400))
SEGMENT = SegmentId(1)


def new_scheduler(*, may_move_keys: bool = True) -> ConnectorScheduler:
    """A scheduler whose workers hold one segment of 200 tokens."""
    from kvshare.vllm_connector.scheduler.event_log import EventLog
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler
    from kvshare.vllm_connector.scheduler.segment_index import HeldSegment, SegmentIndex

    segments = SegmentIndex(max_bytes=1_000_000)
    segments.add(SEGMENT, HeldSegment("namespace", 200, 1_600))
    return ConnectorScheduler(
        segments=segments, events=EventLog(), shares=True, bytes_per_token=8, may_move_keys=may_move_keys
    )


def new_request(ticket_id: str, *copies: WireCopy, request_id: str = "request") -> Request:
    """A request of vLLM with a ticket."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    ticket = Ticket(ticket_id, "namespace", digest_of(TOKENS), len(TOKENS), copies=copies)
    parameters = SamplingParams(
        max_tokens=1, extra_args={"kv_transfer_params": {TICKET_KEY: ticket.to_json()}}
    )
    return Request(request_id, TOKENS, parameters, None, cache_salt=private_salt(ticket_id))


@pytest.mark.parametrize("may_move_keys", [True, False])
def test_a_moved_copy_needs_keys_that_can_be_moved(may_move_keys: bool) -> None:
    """Where they cannot, the request is computed in full, unless its copies stay where they were."""
    moved, unmoved = WireCopy(SEGMENT, 0, 200, 100, 50), WireCopy(SEGMENT, 0, 200, 100, 100)
    scheduler = new_scheduler(may_move_keys=may_move_keys)
    for copy, is_loaded in ((moved, may_move_keys), (unmoved, True)):
        request = new_request(f"ticket at {copy.source_position}", copy)
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (300 if is_loaded else 0)


def test_reports_about_unknown_requests_change_nothing() -> None:
    """A worker may report on a request that was aborted meanwhile; only what it could not read is dropped."""
    from kvshare.vllm_connector.metadata import LoadResult, WorkerReport

    scheduler = new_scheduler()
    report = WorkerReport(
        loads={"aborted": LoadResult(failed=True)},
        saved_prompts={"aborted"},
        stage_seconds={"aborted": {"fetch": 1.0}},
    )
    scheduler.update_connector_output(report, ["aborted"])
    assert scheduler.events.last == 0
    assert SEGMENT in scheduler.segments
    report.loads["aborted"] = LoadResult(failed=True, unreadable=frozenset([SEGMENT]))
    scheduler.update_connector_output(report, [])
    assert scheduler.events.last == 1
    assert SEGMENT not in scheduler.segments


def test_only_the_latest_tickets_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of requests with one ticket (`n` above 1) the first reports its end; memory for that is bounded."""
    from kvshare.vllm_connector.scheduler import scheduler as module

    monkeypatch.setattr(module, "_MAX_SEEN_TICKETS", 2)
    scheduler = new_scheduler()

    def reports(ticket_id: str) -> bool:
        """Whether the end of a request with this ticket is reported."""
        before, request = scheduler.events.last, new_request(ticket_id)
        scheduler.on_new_request(request)
        assert not scheduler.request_finished(request, [])
        return scheduler.events.last > before

    assert [reports(ticket_id) for ticket_id in ("a", "a", "b")] == [True, False, True]
    assert [reports(ticket_id) for ticket_id in ("c", "b", "a")] == [True, False, True]


def test_weights_that_change_end_what_is_stored() -> None:
    """Segments are dropped, and a request that is running is not stored as computed by one model."""
    from kvshare.vllm_connector.metadata import WorkerReport

    scheduler = new_scheduler()
    request: Any = new_request("ticket")
    scheduler.on_new_request(request)
    scheduler.update_state_after_alloc(request, [1, 2], 0)
    report = WorkerReport().aggregate(WorkerReport(has_new_weights=True))
    assert isinstance(report, WorkerReport)
    scheduler.update_connector_output(report, [])
    assert SEGMENT not in scheduler.segments
    request.append_output_token_ids([7])
    request.num_computed_tokens = len(TOKENS)
    assert not scheduler.request_finished(request, [1, 2])
    *_, finished = scheduler.events.read(0).events
    assert isinstance(finished, Finished)
    assert finished.stored == ()


def test_reports_of_two_ranks_become_one() -> None:
    """A load that failed on one rank failed; what one rank could not read is unreadable."""
    from kvshare.vllm_connector.metadata import LoadResult, WorkerReport

    span = (Span(3, 5),)
    first = WorkerReport(
        {"a": LoadResult(repaired=span)}, {"a"}, set(), {"a": {"fetch": 1.0}, "b": {"fetch": 2.0}}
    )
    second = WorkerReport(
        {"a": LoadResult(True, frozenset([SEGMENT])), "c": LoadResult()}, set(), {"b"}, {"a": {"fetch": 9.0}}
    )
    both = first.aggregate(second)
    assert isinstance(both, WorkerReport)
    assert both.loads == {"a": LoadResult(True, frozenset([SEGMENT]), span), "c": LoadResult()}
    assert both.unreadable == {SEGMENT}
    assert (both.saved_prompts, both.failed_saves) == ({"a"}, {"b"})
    assert both.stage_seconds == {"a": {"fetch": 1.0}, "b": {"fetch": 2.0}}


def test_the_connector_is_registered_once() -> None:
    """vLLM calls the plugin in each process, which then reports crashes, and may do so again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvshare.vllm_connector.plugin import NAME, register

    faulthandler.disable()
    register()
    assert faulthandler.is_enabled()
    known = KVConnectorFactory._registry[NAME]
    register()
    assert KVConnectorFactory._registry[NAME] is known
