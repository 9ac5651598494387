"""
How many tokens each step of an answer gives, if vLLM decodes speculatively: what its drafts are worth.

A request gets only accepted tokens, all tokens of a step at once. Before vLLM plans a step, it has read the
results of at most one more. So a step is counted when the request has more tokens than before. The first
token comes from the prompt, and its step has no drafts yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvshare.vllm_connector.scheduler.request_state import TicketedRequest


@dataclass(slots=True, eq=False)
class _Answer:
    request: Request
    ticketed: TicketedRequest
    num_seen: int = 0  # tokens


class AnswerSteps:
    """Counts steps and tokens of answers to requests with a ticket, if `is_on`. On the scheduler's thread."""

    def __init__(self) -> None:
        self.is_on = False
        self._running: dict[str, _Answer] = {}

    def begin(self, request: Request, ticketed: TicketedRequest) -> None:
        """Note that a request got blocks, perhaps again."""
        if self.is_on:
            self._running.setdefault(request.request_id, _Answer(request, ticketed))

    def look(self) -> None:
        """Count the tokens of the last step. Called before each step."""
        for answer in self._running.values():
            _note(answer)

    def end(self, request: Request) -> None:
        """Forget a request that has ended. The caller has called `look` before."""
        self._running.pop(request.request_id, None)


def _note(answer: _Answer) -> None:
    num_tokens = answer.request.num_output_tokens
    if answer.num_seen and num_tokens > answer.num_seen:
        answer.ticketed.num_answer_steps += 1
        answer.ticketed.num_answer_tokens += num_tokens - answer.num_seen
    answer.num_seen = num_tokens
