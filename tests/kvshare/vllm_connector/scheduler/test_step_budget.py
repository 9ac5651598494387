"""No step is asked for more than it may be, and nobody starves: planned requests leave the queue in order."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvshare.vllm_connector.scheduler.step_budget import StepBudget


@dataclass(frozen=True)
class Waiting:
    """A request in vLLM's queue; one without a plan asks for nothing."""

    number: int
    num_tokens: int
    num_bytes: int


def steps(budget: StepBudget, arrivals: list[list[Waiting]]) -> list[list[Waiting]]:
    """
    What is admitted in each step, as vLLM's scheduler does it: who is deferred stays in front of those who
    come later, and others are looked at all the same.
    """
    queue: list[Waiting] = []
    admitted: list[list[Waiting]] = []
    while arrivals or queue:
        queue += arrivals.pop(0) if arrivals else []
        now = [request for request in queue if budget.admits(request.num_tokens, request.num_bytes)]
        queue = [request for request in queue if request not in now]
        admitted.append(now)
        budget.next_step()
    return admitted


def test_fifty_planned_arrivals_are_spread_over_steps() -> None:
    """Each copies 590 MB and computes 2,000 tokens; a step has 1 GiB and 8,192 tokens."""
    requests = [Waiting(number, 2000, 590 * 10**6) for number in range(50)]
    admitted = steps(StepBudget(8192, 2**30), [requests])
    assert [len(step) for step in admitted] == [1] * 50
    assert [request.number for step in admitted for request in step] == list(range(50))


def test_one_that_is_larger_than_a_step_has_one_of_its_own() -> None:
    large, small = Waiting(0, 100, 10), Waiting(1, 1, 1)
    assert steps(StepBudget(10, 100), [[large, small]]) == [[large], [small]]


def test_a_small_one_does_not_pass_a_large_one_that_waits() -> None:
    """Or a large one would never find a step that is empty enough."""
    first, large, small = Waiting(0, 6, 0), Waiting(1, 9, 0), Waiting(2, 1, 0)
    assert steps(StepBudget(10, 100), [[first, large, small]]) == [[first], [large, small]]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), max_size=40),
    per_step=st.integers(1, 8),
    max_tokens=st.integers(1, 40),
    max_bytes=st.integers(1, 40),
)
def test_whatever_comes(sizes: list[tuple[int, int]], per_step: int, max_tokens: int, max_bytes: int) -> None:
    requests = [Waiting(number, *size) for number, size in enumerate(sizes)]
    arrivals = [requests[start : start + per_step] for start in range(0, len(requests), per_step)]
    admitted = steps(StepBudget(max_tokens, max_bytes), arrivals)
    for step in admitted:
        assert len(step) <= 1 or (
            sum(request.num_tokens for request in step) <= max_tokens
            and sum(request.num_bytes for request in step) <= max_bytes
        )
    assert [request for step in admitted for request in step] == requests
    assert len(admitted) <= len(requests) + len(sizes) // per_step + 1
