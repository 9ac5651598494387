"""Which of a composition's approximate plans is used: repairs, doses, donors."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from delta_tree import (
    DeltaTree,
    token_ids,
)
from kvshare.sharing.calibration import cautious
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan
from kvshare.sharing.prediction import FEATURES, Calibration
from kvshare.sharing.rates import BLOCKS, MEMORY, Estimate, LoadRate, Queue, Rates
from kvshare.sharing.risk import REGIMES
from tests.kvshare.sharing.judged_plans import (
    EDITED,
    LIMIT,
    RATES,
    SETTINGS,
    TOKENS,
    certified,
    judged,
    limits,
    planned,
)
from tests.kvshare.sharing.prompts import prompt, replaced, stored


def test_windows_where_they_are_enough(tree: DeltaTree) -> None:
    plan = planned(tree, limits(judged(LIMIT / 2), judged(LIMIT / 9)))
    assert isinstance(plan, Plan)
    assert plan.order is None
    assert plan.num_repaired == 2 * SETTINGS.repair.edit_window + SETTINGS.repair.tail
    assert plan.prediction is not None
    assert plan.prediction.rule == "windows"
    assert plan.prediction.repaired == 2 * SETTINGS.repair.edit_window
    assert plan.deviation == pytest.approx(LIMIT / 2)


@pytest.mark.parametrize("block_s", [1e-12, 1e-9, 1e-3])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_plans_that_were_not_made_would_not_have_been_used(
    tree: DeltaTree, monkeypatch: pytest.MonkeyPatch, in_blocks: bool, block_s: float
) -> None:
    """Whether each is the fastest follows from its outline, wherever its KV lies."""
    node = stored(tree, TOKENS)
    held = node.pieces.segment_ids if in_blocks else frozenset()
    loads = {MEMORY: LoadRate(0.001, 1e-6), BLOCKS: LoadRate(0.0, block_s)}
    rates = replace(RATES, loads=loads, queue=Queue(in_blocks=held), num_extra_passes=1, pass_s=0.01)
    for nats in (0.1, 0.5, 2.0, 8.0):
        given = limits(judged(LIMIT * 0.9), judged(LIMIT * nats, 0.5))
        make = partial(make_plan, EDITED, [node], tree.segment, approximate=True, limits=given, rates=rates)
        plan = make()
        with monkeypatch.context() as patch:
            # What nothing undercuts: all are made.
            patch.setattr(Rates, "least", lambda *_: Estimate(0.0, -1.0))
            assert make() == plan


def test_the_smallest_choice_that_is_expected_to_do(tree: DeltaTree) -> None:
    """A decade less with each unit of log(1 + 4 dose): a dose of 1 is 1.6 of them, a half 1.1."""
    plan = planned(tree, limits(judged(1.0), judged(LIMIT * 10**1.5, 1.0)))
    assert isinstance(plan, Plan)
    assert plan.order is not None
    assert plan.prediction is not None
    assert plan.prediction.rule == "attention"
    stale = 32 * (np.log1p(790 / 32) + np.log1p((2000 - 1210 - SETTINGS.repair.tail) / 32))
    assert plan.order.num_tokens == plan.prediction.repaired == round(stale)
    assert LIMIT / 2 < plan.deviation <= LIMIT


def test_equal_prefixes_only_where_nothing_is_expected_to_do(tree: DeltaTree) -> None:
    """What was expected is said all the same."""
    plan = planned(tree, limits(judged(1.0), judged(0.5)))
    assert isinstance(plan, Plan)
    assert (plan.decision, plan.exact_length, plan.reason) == ("exact", 400, "deviates_too_much")
    assert plan.deviation == 0
    assert plan.prediction is not None
    assert plan.prediction.expected == pytest.approx(0.5)
    moved = token_ids(np.concatenate([prompt(20, seed=3), TOKENS]))
    refused = planned(tree, limits(judged(1.0), judged(0.5)), moved)
    assert isinstance(refused, NoPlan)
    assert refused.reason == "deviates_too_much"
    assert refused.prediction is not None


@pytest.mark.parametrize(("can_probe", "rule"), [(False, "auto"), (True, "windows")])
def test_windows_are_widened_where_nothing_can_be_chosen(tree: DeltaTree, can_probe: bool, rule: str) -> None:
    enough = judged(
        LIMIT * 10**0.75, 1.0
    )  # the windows of the settings are worth .6 decades, twice as long 1
    plan = planned(tree, limits(enough, judged(1.0), can_probe=can_probe, rule=rule))
    assert isinstance(plan, Plan)
    assert plan.order is None
    assert plan.prediction is not None
    assert plan.prediction.repaired == 4 * SETTINGS.repair.edit_window


def test_the_cheaper_of_two_that_do(tree: DeltaTree) -> None:
    """Many edits: their windows are more than a few chosen tokens and what choosing costs."""
    edited = replaced(TOKENS, *((start, start + 2) for start in range(100, 1900, 60)))
    both = limits(judged(LIMIT / 2), judged(LIMIT / 2))
    plan = planned(tree, both, edited)
    by_place = planned(tree, replace(both, can_probe=False), edited)
    assert isinstance(plan, Plan)
    assert isinstance(by_place, Plan)
    assert plan.order is not None
    assert by_place.order is None
    assert plan.estimate.shared_s < by_place.estimate.shared_s


def test_one_donor_where_what_several_give_is_too_far_off(tree: DeltaTree) -> None:
    """Each further donor costs a decade; the one that gives most is enough alone."""
    weights = tuple(1 / np.log(2) if name == "donors" else 0.0 for name in FEATURES)
    by_donors = Calibration(np.log10(LIMIT / 2), weights, (0.0,) * 9, (9.0,) * 9, bias=1.0, spread=0.0)
    first, second = stored(tree, prompt(900, seed=1)), stored(tree, prompt(300, seed=2))
    tokens = token_ids(np.concatenate([prompt(20, seed=3), first.token_ids, second.token_ids]))
    plan = planned(tree, limits(by_donors, by_donors), tokens, first, second)
    assert isinstance(plan, Plan)
    assert plan.donors == (first.node_id,)
    assert plan.deviation == pytest.approx(LIMIT / 2)
    neither = planned(tree, limits(judged(1.0), judged(1.0)), tokens, first, second)
    assert neither.reason == "deviates_too_much"


def test_the_cheaper_of_one_and_several_donors(tree: DeltaTree) -> None:
    """A prompt that differs in one token needs no small pieces of others, nor the repair they ask for."""
    near = stored(tree, replaced(TOKENS[:1500], (700, 701)))
    others = [
        stored(tree, token_ids(np.concatenate([prompt(200, seed=seed), TOKENS[place : place + 60]])))
        for seed, place in ((11, 690), (12, 660), (13, 1440))
    ]
    given = replace(limits(judged(1.0), judged(1.0)), calibration=cautious(), can_probe=True)
    alone = planned(tree, given, TOKENS[:1500], near)
    together = planned(tree, given, TOKENS[:1500], near, *others)
    assert isinstance(alone, Plan)
    assert isinstance(together, Plan)
    assert together.estimate.shared_s <= alone.estimate.shared_s


def test_what_ends_alike_is_computed_to_its_last_token(tree: DeltaTree) -> None:
    """Two prompts share a beginning and their last 16 tokens: the answer starts from computed ones."""
    head, tail = TOKENS[:1000], prompt(SETTINGS.repair.tail, seed=8)
    donor = stored(tree, token_ids(np.concatenate([head, prompt(30, seed=6), tail])))
    asked = token_ids(np.concatenate([head, prompt(20, seed=7), tail]))
    for given in (limits(judged(1e-6), judged(1e-6)), limits(judged(1.0), judged(1.0))):
        plan = planned(tree, given, asked, donor)
        assert isinstance(plan, Plan)
        assert (plan.exact_length, plan.placeholders[-1].end) == (1000, len(asked))
        assert plan.decision == "exact"


def test_nothing_is_chosen_where_much_follows_the_last_copy(tree: DeltaTree) -> None:
    """vLLM computes that in steps of its own, and would repair by place."""
    tokens = token_ids(np.concatenate([prompt(20, seed=3), TOKENS[:900], prompt(1100, seed=4)]))
    given = limits(judged(LIMIT * 10**0.75, 1.0), judged(LIMIT / 9))
    plan = planned(tree, given, tokens, stored(tree, TOKENS))
    assert plan.prediction is not None
    assert plan.prediction.rule == "windows"


def test_five_edits_in_a_long_prompt_cost_two_percent(tree: DeltaTree) -> None:
    """Repair is spent by edit, not by the length of the prompt, for a model that nobody measured too."""
    tokens = prompt(30_000)
    edited = replaced(tokens, *((start, start + 10) for start in range(2000, 27_000, 5000)))
    given = PlannerLimits(
        sharing=SETTINGS.sharing, repair=SETTINGS.repair, calibration=cautious(), can_probe=True
    )
    plan = planned(tree, given, edited, stored(tree, tokens))
    assert isinstance(plan, Plan)
    assert plan.decision == "approx"
    assert plan.num_computed + plan.num_selecting <= 0.02 * 30_000


@pytest.mark.parametrize("num_tokens", [500, 1000, 2000, 8000])
def test_an_unknown_model_shares_edits_in_place(tree: DeltaTree, num_tokens: int) -> None:
    """A tenth changed in five edits is an approximate plan."""
    tokens = prompt(num_tokens)
    size = num_tokens // 50
    edited = replaced(tokens, *((at * num_tokens // 6, at * num_tokens // 6 + size) for at in range(1, 6)))
    given = PlannerLimits(
        sharing=SETTINGS.sharing, repair=SETTINGS.repair, calibration=cautious(), can_probe=True
    )
    plan = planned(tree, given, edited, stored(tree, tokens))
    assert isinstance(plan, Plan)
    assert plan.decision == "approx"
    assert plan.num_copied > num_tokens // 4


def test_a_plan_is_repaired_until_its_kind_was_certified(tree: DeltaTree) -> None:
    """The mean would do without repair; too many of such answers would be above the limit."""
    by_place = certified(judged(LIMIT / 10), most=0.0)
    chosen = certified(judged(LIMIT / 10, 1.0), most=LIMIT / 100)
    plan = planned(tree, limits(by_place, chosen, max_risk=0.02))
    assert isinstance(plan, Plan)
    assert plan.prediction is not None
    assert (plan.decision, plan.prediction.rule, plan.prediction.bound) == ("approx", "attention", LIMIT)
    assert LIMIT / 1000 < plan.deviation <= LIMIT / 100


@pytest.mark.parametrize(("most", "limit"), [(LIMIT / 20, LIMIT), (LIMIT, LIMIT * 2)])
def test_what_was_not_certified_is_not_shared(tree: DeltaTree, most: float, limit: float) -> None:
    """Plans above the highest typical deviation, or with a limit above that of the settings."""
    each = certified(judged(LIMIT / 10), most=most, limit=limit)
    plan = planned(tree, limits(each, each, max_risk=0.02))
    assert (plan.reason, isinstance(plan, Plan) and plan.decision) == ("deviates_too_much", "exact")
    assert plan.prediction is not None
    assert plan.prediction.expected == pytest.approx(LIMIT / 10)
    assert plan.prediction.bound > LIMIT


def test_each_regime_has_its_own_certificate(tree: DeltaTree) -> None:
    """In place: 100 tokens replaced. Moved: 300 new in front. Composed: two donors, one behind the other."""
    donor, other = stored(tree, TOKENS), stored(tree, prompt(900, seed=5))
    asked = {
        "in_place": (replaced(TOKENS, (400, 500)), (donor,)),
        "moved": (token_ids(np.concatenate([prompt(300, seed=3), TOKENS])), (donor,)),
        "composed": (
            token_ids(np.concatenate([prompt(30, seed=3), TOKENS[:900], other.token_ids])),
            (donor, other),
        ),
    }
    for certain in REGIMES:
        each = certified(judged(LIMIT / 10), most=LIMIT, regimes=(certain,))
        given = limits(each, each, max_risk=0.02)
        given = replace(given, sharing=given.sharing.model_copy(update={"max_donors": 2}))
        shared = {
            regime
            for regime, (tokens, donors) in asked.items()
            if isinstance(plan := planned(tree, given, tokens, *donors), Plan)
            and plan.decision == "approx"
            and (regime != "composed" or len(plan.donors) > 1)
        }
        assert shared == {certain}


@pytest.mark.parametrize(
    ("least", "max_budget", "repaired"),
    [(0.0, 0.5, 0.1), (0.3, 0.5, 0.3), (0.5, 0.5, 0.5), (0.5, 0.4, None)],
)
def test_a_plan_of_several_donors_repairs_as_much_as_was_certified(
    tree: DeltaTree, least: float, max_budget: float, repaired: float | None
) -> None:
    """Although its deviation would be small enough with a tenth of that; if it may not, it is refused."""
    donor, other = stored(tree, TOKENS), stored(tree, prompt(900, seed=5))
    by_place = certified(judged(LIMIT / 10), most=LIMIT, regimes=())
    chosen = certified(judged(LIMIT / 10), most=LIMIT, regimes=("composed",))
    given = limits(by_place, chosen, max_risk=0.02)
    given = replace(
        given,
        sharing=given.sharing.model_copy(update={"max_donors": 2}),
        repair=given.repair.model_copy(update={"max_budget": max_budget}),
        calibration=replace(given.calibration, composed={"attention": replace(chosen, least_repaired=least)}),
    )
    tokens = token_ids(np.concatenate([prompt(30, seed=3), TOKENS[:900], other.token_ids]))
    plan = planned(tree, given, tokens, donor, other)
    if repaired is None:
        assert not isinstance(plan, Plan)
        assert plan.reason == "deviates_too_much"
        return
    assert isinstance(plan, Plan)
    assert plan.prediction is not None
    assert (len(plan.donors), plan.prediction.rule) == (2, "attention")
    share = plan.prediction.repaired / len(tokens)
    assert share == pytest.approx(repaired, abs=0.001) if least else share < repaired
