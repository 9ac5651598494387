"""No step computes more than it may, and nobody starves: loads have their turn in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvshare.vllm_connector.worker.step_budget import num_admitted


def steps(max_tokens: int, sizes: list[int]) -> list[list[int]]:
    """What is computed in each step of loads that have all arrived."""
    done = list[list[int]]()
    while sizes:
        count = num_admitted(sizes, max_tokens)
        done.append(sizes[:count])
        sizes = sizes[count:]
    return done


def test_fifty_planned_arrivals_are_spread_over_steps() -> None:
    """Each computes 2,000 tokens; a step has 8,192."""
    assert [len(step) for step in steps(8192, [2000] * 50)] == [4] * 12 + [2]


def test_one_that_is_larger_than_a_step_has_one_of_its_own() -> None:
    assert steps(10, [1, 100, 1]) == [[1], [100], [1]]


def test_a_small_one_does_not_pass_a_large_one_that_waits() -> None:
    """Or a large one would never find a step that is empty enough."""
    assert num_admitted([6, 9, 1], 10) == 1


@given(sizes=st.lists(st.integers(0, 30), max_size=40), max_tokens=st.integers(1, 40))
def test_whatever_comes(sizes: list[int], max_tokens: int) -> None:
    done = steps(max_tokens, sizes)
    assert all(sum(step) <= max_tokens or len([size for size in step if size]) == 1 for step in done)
    assert [size for step in done for size in step] == sizes
    assert all(done)
