"""What is worth its time where rates are not measured yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from delta_tree import Span
from kvshare.reasons import Reason
from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.rates import MEMORY, LoadRate, PrefillWork, Queue, Rates
from kvshare.sharing.worth import Worth
from tests.kvshare.sharing.test_cost import BYTES, TRUE
from vector_index import Candidate, Nomination

LIMITS = PlannerLimits.from_settings(load_settings())


@pytest.mark.parametrize("num_tokens", [4096, 16384])
def test_prompts_are_looked_up_until_a_load_is_measured(num_tokens: int) -> None:
    """A prior that takes loads for slower than computing would never be corrected by requests it refuses."""
    slow = replace(TRUE, loads={MEMORY: LoadRate(0.001, 1 / 0.5e9)}, lookup=LoadRate(0.001, 1e-7))
    cost = CostModel(slow)
    worth = Worth(cost)
    for _ in range(3):
        cost.observe_lookup(num_tokens, 0.002)
        cost.observe_prefill(num_tokens, TRUE.full_s(num_tokens))
    assert all(worth.lookup_now(num_tokens, LIMITS) for _ in range(100))
    cost.observe_load(num_tokens * BYTES, num_tokens * BYTES / 0.5e9)
    assert sum(worth.lookup_now(num_tokens, LIMITS) for _ in range(100)) <= 1


def test_prompts_for_which_no_load_is_quick_enough_are_not_looked_up() -> None:
    """Whose full prefill takes no longer than what a plan must save."""
    cost = CostModel(replace(TRUE, step_s=0.001))
    worth = Worth(cost)
    for _ in range(3):
        cost.observe_lookup(64, 0.002)
        cost.observe_prefill(64, 0.003)
    assert sum(worth.lookup_now(64, LIMITS) for _ in range(100)) <= 1


def test_no_prompt_is_embedded_before_both_times_are_measured() -> None:
    """By priors of a slow machine the first prompts would wait for an embedding that saves them nothing."""
    cost = CostModel(replace(TRUE, token_s=0.001))
    worth = Worth(cost)
    assert not any(worth.embedding(8192, LIMITS) for _ in range(10))
    cost.observe_embedding(8192, 0.01)
    assert not any(worth.embedding(8192, LIMITS) for _ in range(10))
    cost.observe_prefill(8192, 2.0)
    assert worth.embedding(8192, LIMITS)
    cost.observe_prefill(8192, 0.08)
    for _ in range(20):
        cost.observe_prefill(8192, 0.08)
    assert not any(worth.embedding(8192, LIMITS) for _ in range(200))


def learned() -> CostModel:
    """On a device like TRUE, where everything was measured."""
    cost = CostModel(replace(TRUE, lookup=LoadRate(0.0004, 1e-7)))
    for num_tokens in (512, 2048, 8192):
        cost.observe_prefill(num_tokens, TRUE.full_s(num_tokens))
        work = PrefillWork(
            num_tokens // 10, num_tokens**2 / 20, num_passes=1, num_reused=num_tokens * 9 // 10
        )
        cost.observe(work, TRUE.seconds(work))
        cost.observe_load(num_tokens * BYTES, TRUE.load_s(num_tokens))
    return cost


@pytest.mark.parametrize(("num_tokens", "expected"), [(900, False), (2048, True)])
def test_passages_are_searched_where_a_pass_would_pay(num_tokens: int, expected: bool) -> None:
    """A shorter prompt is looked up for its prefix only, which needs no pass."""
    worth = Worth(learned())
    assert worth.lookup(num_tokens, LIMITS)
    assert worth.passages(num_tokens, LIMITS) is expected


def test_passages_are_searched_until_a_pass_is_measured() -> None:
    """However long one takes by its prior."""
    assert Worth(CostModel(replace(TRUE, pass_s=1.0))).passages(2048, LIMITS)


@pytest.mark.parametrize(
    ("num_tokens", "score", "num_prefix_tokens", "expected"),
    [
        (4096, 0.1, 0, False),
        (4096, 0.9, 0, True),
        (16384, 0.3, 0, True),
        (4096, 0.5, 2048, True),  # without a pass
        (4096, 0.0, 0, True),  # found by its meaning: nobody knows what it shares
    ],
)
def test_a_plan_is_made_where_its_donors_have_enough(
    num_tokens: int, score: float, num_prefix_tokens: int, expected: bool
) -> None:
    """By the share of the prompt that the search for them estimates."""
    candidate = Candidate(1, ("fingerprint",) if score else ("embedding",), score)
    nomination = Nomination((candidate,), num_prefix_tokens, {}, ())
    assert Worth(learned()).planning(num_tokens, nomination, LIMITS) is expected


@pytest.mark.parametrize(("num_reused", "expected"), [(20, False), (3686, True)])
def test_a_plan_is_tried_where_it_may_pay_if_loads_cost_nothing(num_reused: int, expected: bool) -> None:
    """A load of a few tokens says little of what a long one takes, and the tries are few."""
    worth = Worth(CostModel(replace(TRUE, loads={MEMORY: LoadRate(0.001, 1 / 1e9)})))
    num_computed = 4096 - num_reused

    def make(limits: PlannerLimits, rates: Rates) -> Plan | NoPlan:
        estimate = rates.estimate(4096, PrefillWork(num_computed, 4096 * num_computed / 2))
        if limits.threshold.pays(0.0, 1.0):  # anything does
            spans = (Span(num_reused, 4096),)
            return Plan(4096, num_reused, (), spans, (), generation=0, estimate=estimate)
        return NoPlan(Reason.DOES_NOT_PAY)

    assert isinstance(worth.plan(make, LIMITS, Queue()), Plan) is expected
