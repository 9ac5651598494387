"""What is worth its time where rates are not measured yet."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvshare.settings import load_settings
from kvshare.sharing.cost import CostModel
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.rates import MEMORY, LoadRate
from kvshare.sharing.worth import Worth
from tests.kvshare.sharing.test_cost import BYTES, TRUE

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
