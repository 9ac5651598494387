"""Saves of a prompt and of its answer, as the scheduler requests them and workers report them. No engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvshare.vllm_protocol.messages import FinishedReport, Prefilled
from tests.kvshare.vllm_connector.scheduler.one_segment import TOKENS, new_request, new_scheduler

if TYPE_CHECKING:
    from kvshare.vllm_connector.metadata import SaveRequest
    from kvshare.vllm_connector.scheduler.scheduler import ConnectorScheduler

NAME, OUTPUT = "request", [7, 8, 9]
PROMPT, ANSWER = len(TOKENS), len(OUTPUT) - 1  # tokens: the last one of an answer is never computed


class Saved:
    """A request that is prefilled, and what its saves come to."""

    def __init__(self, scheduler: ConnectorScheduler) -> None:
        self.scheduler = scheduler
        self.request: Any = new_request("ticket", request_id=NAME)
        scheduler.on_new_request(self.request)
        scheduler.get_num_new_matched_tokens(self.request, 0)
        scheduler.update_state_after_alloc(self.request, [1, 2], 0)
        self.request.append_output_token_ids(OUTPUT)
        self.request.num_computed_tokens = PROMPT + ANSWER

    def step(self) -> int:
        """A step in which it runs, until it has ended. Returns how many tokens are to be saved."""
        runs = self.scheduler._requests[NAME].state == "running"
        step = SimpleNamespace(
            num_scheduled_tokens={NAME: 1} if runs else {},
            preempted_req_ids=None,
            total_num_scheduled_tokens=1,
            kv_connector_block_state=SimpleNamespace(resolve_block_ids=lambda _: ([1, 2],)),
            scheduled_cached_reqs=SimpleNamespace(req_ids=[NAME], num_computed_tokens=[PROMPT]),
            scheduled_new_reqs=[],
        )
        saves: tuple[SaveRequest, ...] = self.scheduler.build_connector_meta(step).saves
        return sum(len(span) for save in saves for _, span in save.spans)

    def end(self) -> int:
        assert self.scheduler.request_finished(self.request, [1, 2])
        return self.step()

    def report(self, *, prompt: bool = False, rest: bool = False, fails: bool = False) -> None:
        """The save of the prompt, or the one after the end, is over."""
        from kvshare.vllm_connector.metadata import WorkerReport

        report = WorkerReport(
            saved_prompts={NAME} if prompt else set(), failed_saves={NAME} if fails else set()
        )
        self.scheduler.update_connector_output(report, [NAME] if rest else [])

    def drop_prompt(self) -> None:
        self.scheduler.drop([s.segment_id for s in self.scheduler._requests[NAME].retention.prompt])

    @property
    def finished(self) -> tuple[str | None, int, int]:
        """Its one report: the reason, and the tokens that are retained of prompt and answer."""
        (found,) = (e for e in self.scheduler.events.read(0).events if isinstance(e, FinishedReport))
        assert not self.scheduler._requests
        held = sum(segment.length for segment in found.stored)
        assert self.scheduler.segments.num_bytes == 1_600 + 8 * held  # with the segment that was there before
        return found.reason, held, len(found.output_ids)

    @property
    def is_donor(self) -> bool:
        return any(isinstance(event, Prefilled) for event in self.scheduler.events.read(0).events)


@pytest.fixture
def saved() -> Saved:
    return Saved(new_scheduler())


def test_the_prompt_is_saved_once_and_then_the_answer(saved: Saved) -> None:
    assert (saved.step(), saved.step()) == (PROMPT, 0)
    assert not saved.is_donor
    saved.report(prompt=True)
    assert saved.is_donor
    assert saved.end() == ANSWER
    saved.report(rest=True)
    assert saved.finished == (None, PROMPT + ANSWER, ANSWER)


def test_a_request_may_end_before_its_prompt_is_saved(saved: Saved) -> None:
    assert (saved.step(), saved.end()) == (PROMPT, ANSWER)
    saved.report(prompt=True)
    saved.report(rest=True)
    assert saved.is_donor
    assert saved.finished == (None, PROMPT + ANSWER, ANSWER)


def test_a_prompt_that_was_not_saved_is_saved_with_its_answer(saved: Saved) -> None:
    assert saved.step() == PROMPT
    saved.report(prompt=True, fails=True)
    assert (saved.step(), saved.end()) == (0, PROMPT + ANSWER)
    saved.report(rest=True)
    assert not saved.is_donor
    assert saved.finished == (None, PROMPT + ANSWER, ANSWER)


def test_a_prompt_without_room_is_tried_again_at_the_end(saved: Saved) -> None:
    segments = saved.scheduler.segments
    segments.max_bytes, enough = 8 * PROMPT - 1, segments.max_bytes
    assert (saved.step(), saved.step()) == (0, 0)
    segments.max_bytes = enough
    assert saved.end() == PROMPT + ANSWER
    saved.report(rest=True)
    assert saved.finished == (None, PROMPT + ANSWER, ANSWER)


@pytest.mark.parametrize(
    ("is_reported", "is_dropped", "finished"),
    [
        (True, False, ("save_failed", PROMPT, 0)),  # the prompt stays retained
        (True, True, ("save_failed", 0, 0)),
        (False, False, ("save_failed", 0, 0)),
        (False, True, ("save_failed", 0, 0)),
    ],
)
def test_an_answer_that_cannot_be_saved_leaves_a_prompt_that_the_proxy_knows(
    saved: Saved, is_reported: bool, is_dropped: bool, finished: tuple[str, int, int]
) -> None:
    assert saved.step() == PROMPT
    if is_reported:
        saved.report(prompt=True)
    assert saved.end() == ANSWER
    if is_dropped:
        saved.drop_prompt()
    saved.report(rest=True, fails=True)
    assert saved.finished == finished


@pytest.mark.parametrize("is_reported", [False, True])
def test_an_answer_without_its_prompt_is_not_retained(saved: Saved, is_reported: bool) -> None:
    """The prompt's save has failed, or its segments were dropped, while the answer was being saved."""
    assert saved.step() == PROMPT
    if is_reported:
        saved.report(prompt=True)
    assert saved.end() == ANSWER
    if is_reported:
        saved.drop_prompt()
    else:
        saved.report(prompt=True, fails=True)
    saved.report(rest=True)
    assert saved.finished == ("segments_gone", 0, 0)
