"""Which tokens of a request are retained: pure functions of its state and of vLLM's."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from kvshare.vllm_connector.scheduler.request_state import State, TicketedRequest
from kvshare.vllm_protocol.messages import WireCopy


def end_of_prompt(ticketed: TicketedRequest) -> int:
    """Return the end of what is retained of the prompt."""
    retention = ticketed.retention
    targets = (ticketed.copy(index).target.end for index in retention.copies)
    return max([*targets, *(segment.span.end for segment in retention.prompt)])


def unrepaired_copies(ticketed: TicketedRequest) -> list[WireCopy]:
    """Return the copies in its slots of which no token was computed again."""
    copies = (ticketed.copy(index) for index in ticketed.placed)
    return [copy for copy in copies if not any(copy.target.intersection(s) for s in ticketed.repaired)]


def first_retained_approximate(ticketed: TicketedRequest, copies: Iterable[int]) -> int:
    """Return the start of the first retained approximate copy: later tokens attended to approximate KV."""
    starts, exact = (ticketed.copy(index).target_start for index in copies), ticketed.ticket.exact_length
    return min((start for start in starts if start >= exact), default=ticketed.ticket.num_tokens)


def num_retained_of(request: Request, ticketed: TicketedRequest) -> int:
    """
    Return how many leading tokens have their KV in the slots; 0 if nothing may be retained.

    The last sampled token is never computed. A preempted request has lost its slots, one that was aborted in
    prefill has not filled them, and one whose load has not begun has empty slots.
    """
    if ticketed.state is not State.RUNNING:
        return 0
    num_computed: int = request.num_prompt_tokens + request.num_output_tokens - 1
    is_complete = request.num_output_tokens and request.num_computed_tokens >= num_computed
    return num_computed if ticketed.may_retain and is_complete else 0


def num_computed(step: SchedulerOutput) -> dict[str, int]:
    """Return how many tokens of each request of a step were computed before it."""
    cached = step.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return computed | {request.req_id: request.num_computed_tokens for request in step.scheduled_new_reqs}
