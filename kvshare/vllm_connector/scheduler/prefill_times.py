"""
How long the prefills of requests take in vLLM: from their first blocks to their first token, including loads
but not the wait for blocks. `answer_steps.py` counts the steps after the first token.

The proxy sees the first token only if an answer is streamed; this is for the others. vLLM plans its next step
when it has read what the last one sampled, so the time is taken before a step, or at the end of the request.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvshare.vllm_connector.scheduler.answer_steps import AnswerSteps

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from kvshare.vllm_connector.scheduler.request_state import TicketedRequest


@dataclass(frozen=True, slots=True, eq=False)
class _Prefill:
    request: Request
    ticketed: TicketedRequest
    began: float


class PrefillTimes:
    """Measures requests with a ticket until their first token. Used on the scheduler's thread."""

    def __init__(self) -> None:
        self._running: dict[str, _Prefill] = {}
        self.steps = AnswerSteps()

    def begin(self, request: Request, ticketed: TicketedRequest) -> None:
        """Note that a request got blocks. If it had some before, it was preempted, and is not measured."""
        self.steps.begin(request, ticketed)
        if ticketed.was_admitted:
            self._running.pop(request.request_id, None)
        else:
            self._running[request.request_id] = _Prefill(request, ticketed, time.perf_counter())

    def look(self) -> None:
        """Note the times of requests that have their first token by now. Called before each step."""
        self.steps.look()
        now = time.perf_counter()
        done = [each for each in self._running.values() if each.request.num_output_tokens]
        for each in done:
            del self._running[each.request.request_id]
            each.ticketed.first_token_s = now - each.began

    def end(self, request: Request) -> None:
        """Forget a request that has ended, with or without a first token."""
        self.look()
        self.steps.end(request)
        self._running.pop(request.request_id, None)
