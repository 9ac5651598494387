"""Steps of answers that are decoded speculatively, counted by what vLLM's requests have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvshare.vllm_connector.scheduler.answer_steps import AnswerSteps


def running(steps: AnswerSteps) -> tuple[Any, Any]:
    request = SimpleNamespace(request_id="r", num_output_tokens=0)
    ticketed = SimpleNamespace(num_answer_steps=0, num_answer_tokens=0)
    steps.begin(request, ticketed)  # type: ignore[arg-type]  # all that it looks at
    return request, ticketed


def test_each_step_that_gave_tokens_counts_once() -> None:
    """But for the first token, and steps that gave none, as those after a preemption."""
    steps = AnswerSteps()
    steps.is_on = True
    request, ticketed = running(steps)
    for num_tokens in (0, 0, 1, 1, 4, 4, 5, 9):
        request.num_output_tokens = num_tokens
        steps.look()
    steps.begin(request, ticketed)  # preempted, and admitted again
    request.num_output_tokens = 11
    steps.look()
    steps.end(request)
    request.num_output_tokens = 20
    steps.look()
    assert (ticketed.num_answer_steps, ticketed.num_answer_tokens) == (4, 10)


def test_nothing_is_counted_without_speculative_decoding() -> None:
    steps = AnswerSteps()
    request, ticketed = running(steps)
    for num_tokens in (1, 2, 3):
        request.num_output_tokens = num_tokens
        steps.look()
    assert (ticketed.num_answer_steps, ticketed.num_answer_tokens) == (0, 0)
