"""The scheduler side on vLLM's own request objects, without an engine: tickets, and reports of workers."""

from __future__ import annotations

import faulthandler
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from delta_tree import Span
from kvshare.vllm_protocol.messages import FinishedReport, WireCopy
from tests.kvshare.vllm_connector.scheduler.one_segment import SEGMENT, TOKENS, new_request, new_scheduler

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import LoadRequest
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler


@pytest.mark.parametrize("may_move_keys", [True, False])
def test_a_moved_copy_needs_keys_that_can_be_moved(may_move_keys: bool) -> None:
    """Where they cannot, the request is computed in full, unless its copies stay where they were."""
    moved, unmoved = WireCopy(SEGMENT, 0, 200, 100, 50), WireCopy(SEGMENT, 0, 200, 100, 100)
    scheduler = new_scheduler(may_move_keys=may_move_keys)
    for copy, is_loaded in ((moved, may_move_keys), (unmoved, True)):
        request = new_request(f"ticket at {copy.source_position}", copy)
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == ((300, True) if is_loaded else (0, False))


class TestLoadsThatBeginLater:
    """vLLM 0.33 may allocate a load's blocks, count its tokens as computed, and begin it steps later."""

    COPY = WireCopy(SEGMENT, 0, 200, 100, 50)

    @pytest.fixture
    def scheduler(self) -> ConnectorScheduler:
        return new_scheduler()

    def looked_up(self, scheduler: ConnectorScheduler) -> Any:
        """A request with blocks, whose 300 tokens are promised but not loaded."""
        request: Any = new_request("ticket", self.COPY)
        scheduler.on_new_request(request)
        assert scheduler.get_num_new_matched_tokens(request, 0) == (300, True)
        request.num_computed_tokens = 300
        return request

    def loads(self, scheduler: ConnectorScheduler) -> tuple[LoadRequest, ...]:
        from kvshare.vllm_connector.metadata import StepMetadata

        step = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, total_num_scheduled_tokens=0)
        made = scheduler.build_connector_meta(step)
        assert isinstance(made, StepMetadata)
        return made.loads

    def test_it_begins_when_vllm_says_so(self, scheduler: ConnectorScheduler) -> None:
        """Not before, and it is the load that was promised."""
        request = self.looked_up(scheduler)
        assert self.loads(scheduler) == ()
        scheduler.update_state_after_alloc(request, [1, 2], 300)
        (load,) = self.loads(scheduler)
        assert (load.start, load.end, load.block_ids, load.copies) == (0, 300, (1, 2), (self.COPY,))

    def test_its_end_is_no_second_load(self, scheduler: ConnectorScheduler) -> None:
        """When the tokens are loaded vLLM calls once more, with none to load."""
        request = self.looked_up(scheduler)
        scheduler.update_state_after_alloc(request, [1, 2], 300)
        self.loads(scheduler)
        scheduler.update_state_after_alloc(request, [1, 2], 0)
        assert self.loads(scheduler) == ()
        assert scheduler.request_finished(request, [1, 2]) is False  # its blocks wait for the load anyway

    def test_a_segment_that_left_meanwhile_is_computed(self, scheduler: ConnectorScheduler) -> None:
        """The tokens are promised, so the worker computes them."""
        request = self.looked_up(scheduler)
        scheduler.drop([SEGMENT])
        scheduler.update_state_after_alloc(request, [1, 2], 300)
        (load,) = self.loads(scheduler)
        assert (load.copies, load.runs()) == ((), (Span(0, 300),))

    @pytest.mark.parametrize("num_output", [0, 1])
    def test_one_that_never_begins_saves_nothing(
        self, scheduler: ConnectorScheduler, num_output: int
    ) -> None:
        """Its client left. vLLM takes the blocks at once, and nobody has filled them."""
        request = self.looked_up(scheduler)
        request.append_output_token_ids([7] * num_output)  # it was preempted
        request.num_computed_tokens = len(TOKENS)  # all of the prompt was promised
        assert scheduler.request_finished(request, [1, 2]) is False
        (finished,) = scheduler.events.read(0).events
        assert isinstance(finished, FinishedReport)
        assert (finished.decision, finished.stored) == ("full", ())

    def test_one_that_is_looked_up_and_not_admitted_is_looked_up_again(
        self, scheduler: ConnectorScheduler
    ) -> None:
        """vLLM had no room for it; what it found in its own cache is what it found last."""
        request = self.looked_up(scheduler)
        request.num_computed_tokens = 0
        assert scheduler.get_num_new_matched_tokens(request, 16) == (284, True)
        scheduler.update_state_after_alloc(request, [1, 2], 284)
        (load,) = self.loads(scheduler)
        assert (load.start, load.end) == (16, 300)

    @pytest.mark.parametrize(("num_external", "copies"), [(300, (COPY,)), (288, ()), (64, ())])
    def test_vllm_may_take_less(
        self, scheduler: ConnectorScheduler, num_external: int, copies: tuple[WireCopy, ...]
    ) -> None:
        """A copy that ends behind what it wants has no slots, and counts as not placed."""
        request = self.looked_up(scheduler)
        scheduler.update_state_after_alloc(request, [1, 2], num_external)
        (load,) = self.loads(scheduler)
        assert (load.end, load.copies) == (num_external, copies)
        assert all(span.end <= num_external for span in load.runs())


def test_reports_about_unknown_requests_change_nothing() -> None:
    """A worker may report on a request that was aborted meanwhile; only what it could not read is dropped."""
    from kvshare.vllm_connector.metadata import LoadResult, WorkerReport

    scheduler = new_scheduler()
    report = WorkerReport(
        loads={"aborted": LoadResult(failed=True)},
        saved_prompts={"aborted"},
        stage_seconds={"aborted": {"verify": 1.0}},
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
    from kvshare.vllm_connector.scheduler import ticket_reader

    monkeypatch.setattr(ticket_reader, "_MAX_SEEN", 2)
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
    assert isinstance(finished, FinishedReport)
    assert finished.stored == ()


def test_reports_of_two_ranks_become_one() -> None:
    """A load that failed on one rank failed; what one rank could not read is unreadable."""
    from kvshare.vllm_connector.metadata import LoadResult, WorkerReport

    span = (Span(3, 5),)
    first = WorkerReport(
        {"a": LoadResult(repaired=span)}, {"a"}, set(), {"a": {"verify": 1.0}, "b": {"verify": 2.0}}
    )
    second = WorkerReport(
        {"a": LoadResult(True, frozenset([SEGMENT])), "c": LoadResult()}, set(), {"b"}, {"a": {"verify": 9.0}}
    )
    both = first.aggregate(second)
    assert isinstance(both, WorkerReport)
    assert both.loads == {"a": LoadResult(True, frozenset([SEGMENT]), span), "c": LoadResult()}
    assert both.unreadable == {SEGMENT}
    assert (both.saved_prompts, both.failed_saves) == ({"a"}, {"b"})
    assert both.stage_seconds == {"a": {"verify": 1.0}, "b": {"verify": 2.0}}


def test_the_connectors_are_registered_once() -> None:
    """vLLM calls the plugin in each process, which then reports crashes, and may do so again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvshare.vllm_connector.plugin import MODULES, register

    faulthandler.disable()
    register()
    assert faulthandler.is_enabled()
    known = {name: KVConnectorFactory._registry[name] for name in MODULES}
    register()
    assert {name: KVConnectorFactory._registry[name] for name in MODULES} == known
    assert [each().__name__ for each in known.values()] == list(MODULES)
