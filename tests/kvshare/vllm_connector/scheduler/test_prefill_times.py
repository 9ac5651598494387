"""How long a prefill took: of answers that are not streamed the proxy does not see the first token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvshare.vllm_protocol.messages import FinishedReport, WireCopy
from tests.kvshare.vllm_connector.scheduler.one_segment import SEGMENT, new_request, new_scheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.v1.request import Request

    from kvshare.vllm_connector.metadata import WorkerReport
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler

STEP = SimpleNamespace(num_scheduled_tokens={}, preempted_req_ids=None, total_num_scheduled_tokens=0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the time."""
    from kvshare.vllm_connector.scheduler import prefill_times

    def set_time(seconds: float) -> None:
        monkeypatch.setattr(prefill_times, "time", SimpleNamespace(perf_counter=lambda: seconds))

    set_time(0.0)
    return set_time


def reported(scheduler: ConnectorScheduler, request: Request) -> float | None:
    scheduler.request_finished(request, [1, 2])
    scheduler.update_connector_output(_saved(), [request.request_id])
    *_, finished = scheduler.events.read(0).events
    assert isinstance(finished, FinishedReport)
    return finished.first_token_s


def admitted(scheduler: ConnectorScheduler, ticket_id: str = "ticket") -> Request:
    request = new_request(ticket_id, request_id=ticket_id)
    scheduler.on_new_request(request)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, [1, 2], 0)
    return request


def test_it_is_known_before_the_step_after_it(now: Callable[[float], None]) -> None:
    """Chunks of the prompt before it do not end it, tokens after it change nothing."""
    scheduler = new_scheduler()
    now(5.0)
    request = admitted(scheduler)
    for seconds, num_new in ((5.5, 0), (6.0, 1), (9.0, 1)):
        request.append_output_token_ids([7] * num_new)
        now(seconds)
        scheduler.build_connector_meta(STEP)
    assert reported(scheduler, request) == 1.0


def test_an_answer_of_one_token_ends_with_it(now: Callable[[float], None]) -> None:
    """vLLM plans no further step for it."""
    scheduler = new_scheduler()
    request = admitted(scheduler)
    now(2.0)
    request.append_output_token_ids([7])
    assert reported(scheduler, request) == 2.0


def test_one_that_was_preempted_has_none(now: Callable[[float], None]) -> None:
    """It waited for others, and was computed twice."""
    scheduler = new_scheduler()
    request = admitted(scheduler)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, [3, 4], 0)
    now(2.0)
    request.append_output_token_ids([7])
    assert reported(scheduler, request) is None


def test_one_without_a_token_has_none(now: Callable[[float], None]) -> None:
    """Its client left. Nothing of it is held any longer, nor mixed up with the next one."""
    scheduler = new_scheduler()
    request = admitted(scheduler)
    assert reported(scheduler, request) is None
    assert not scheduler.times._running
    other = admitted(scheduler, "other")
    now(1.5)
    other.append_output_token_ids([7])
    assert reported(scheduler, other) == 1.5


def test_loading_counts(now: Callable[[float], None]) -> None:
    """As in the time until a streamed answer's first token."""
    scheduler = new_scheduler()
    request: Any = new_request("ticket", WireCopy(SEGMENT, 0, 200, 100, 50))
    scheduler.on_new_request(request)
    scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.update_state_after_alloc(request, [1, 2], 300)
    request.num_computed_tokens = 300
    now(1.0)
    scheduler.build_connector_meta(STEP)
    scheduler.update_connector_output(_loaded(request.request_id), [])
    scheduler.update_state_after_alloc(request, [1, 2], 0)
    now(3.0)
    request.append_output_token_ids([7])
    assert reported(scheduler, request) == 3.0


def _saved() -> WorkerReport:
    from kvshare.vllm_connector.metadata import WorkerReport

    return WorkerReport()


def _loaded(request_id: str) -> WorkerReport:
    from kvshare.vllm_connector.metadata import LoadResult, WorkerReport

    return WorkerReport({request_id: LoadResult()})
