"""What a finished request of a replica teaches about costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvshare.fleet.observation import observe
from kvshare.fleet.routed_request import RequestProgress
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.vllm_protocol.messages import FinishedReport
from tests.kvshare.fleet.reports import prompt, request

FULL = FinishedReport("r", "full", None, num_computed=1000, first_token_s=0.4)


def observed(progress: RequestProgress, finished: FinishedReport) -> list[tuple[Any, ...]]:
    """The prefills that the cost model has learned from."""
    cost = CostModel.from_settings(load_settings().cost, bytes_per_token=100, num_extra_passes=1)
    observe(cost, request(prompt(1, 1000)).routed, progress, finished)
    return [(kind, features[1], seconds) for kind, features, seconds in cost.rows()["work"]]


def test_a_streamed_answer_is_timed_where_it_arrives() -> None:
    """With all that is on the way."""
    progress = RequestProgress(was_alone=True, prefill_s=0.5)
    assert observed(progress, FULL) == [("prefill", 1000, 0.5)]


def test_an_answer_that_is_not_streamed_is_timed_by_the_connector() -> None:
    """Its first token does not arrive before its last one."""
    assert observed(RequestProgress(was_alone=True), FULL) == [("prefill", 1000, 0.4)]


@pytest.mark.parametrize("prefill_s", [None, 0.5])
def test_a_prefill_next_to_others_is_not_learned_from(prefill_s: float | None) -> None:
    """Whoever timed it."""
    assert observed(RequestProgress(was_alone=False, prefill_s=prefill_s), FULL) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"first_token_s": None},  # of an older connector, or preempted
        {"num_local": 16},  # vLLM's own prefix cache had some of it
    ],
)
def test_a_prefill_of_unknown_work_or_time_is_not_learned_from(changes: dict[str, Any]) -> None:
    """It would teach a wrong rate."""
    assert observed(RequestProgress(was_alone=True), replace(FULL, **changes)) == []
