"""What need not be composed: plans that would not be used. The plan is the same as with them."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import DeltaTree, Node, Target, TokenIds, compose, token_ids
from kvshare.settings import RepairSettings
from kvshare.sharing import planner
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.originals import least_s
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan
from kvshare.sharing.rates import LoadRate, Rates
from tests.kvshare.sharing.judged_plans import LIMIT, certified, judged, limits
from tests.kvshare.sharing.prompts import stored
from tests.kvshare.sharing.test_inherited_deviation import off_by

_WORDS = 30_000


def edited(rng: np.random.Generator, tokens: TokenIds, num_edits: int) -> TokenIds:
    """The prompt with some tokens replaced by others, perhaps by more or fewer."""
    found = tokens.tolist()
    for place in sorted(rng.choice(len(found), num_edits, replace=False).tolist(), reverse=True):
        removed, added = rng.integers(0, 9, 2).tolist()
        found[place : place + removed] = rng.integers(0, _WORDS, added).tolist()
    return token_ids(found)


def made(
    tree: DeltaTree, tokens: TokenIds, nodes: list[Node], given: PlannerLimits, rates: Rates
) -> Plan | NoPlan:
    return make_plan(tokens, nodes, tree.segment, approximate=True, limits=given, rates=rates)


@st.composite
def any_rates(draw: st.DrawFn) -> Rates:
    """Loads take up to as long as computing, some more."""
    return Rates(
        step_s=draw(st.sampled_from([0.0, 0.01])),
        token_s=1e-3,
        pair_s=draw(st.sampled_from([0.0, 1e-6])),
        pass_s=draw(st.sampled_from([0.0, 0.02])),
        reused_s=draw(st.sampled_from([0.0, 1e-4])),
        loads={
            "memory": LoadRate(draw(st.sampled_from([0.0, 0.01])), draw(st.sampled_from([0.0, 5e-4, 2e-3])))
        },
        bytes_per_token=1,
        num_extra_passes=draw(st.integers(0, 2)),
    )


@st.composite
def any_limits(draw: st.DrawFn) -> PlannerLimits:
    off = st.sampled_from([LIMIT / 9, LIMIT / 2, LIMIT * 2])
    found = limits(
        judged(draw(off)), judged(draw(off), draw(st.sampled_from([0.0, 1.0]))), can_probe=draw(st.booleans())
    )
    small = {
        "max_budget": draw(st.sampled_from([0.02, 0.1, 0.5])),
        "edit_window": draw(st.sampled_from([4, 24])),
    }
    return PlannerLimits(
        sharing=found.sharing.model_copy(update={"min_prompt_tokens": 64}),
        repair=RepairSettings(**{**found.repair.model_dump(), **small}),
        calibration=found.calibration,
        can_probe=found.can_probe,
    )


@given(st.integers(0, 2**32), any_limits(), any_rates())
@settings(max_examples=150, deadline=None)
def test_no_plan_of_originals_takes_less(seed: int, given_limits: PlannerLimits, rates: Rates) -> None:
    rng, tree = np.random.default_rng(seed), DeltaTree.open(None, identity="test")
    first = token_ids(rng.integers(0, _WORDS, int(rng.integers(300, 900))))
    others = [edited(rng, first, int(rng.integers(1, 40))) for _ in range(int(rng.integers(0, 3)))]
    nodes = [stored(tree, tokens) for tokens in (first, *others)]
    tokens = edited(rng, first, int(rng.integers(1, 60)))
    plan = made(tree, tokens, nodes, given_limits, rates)
    target = Target(tokens, min_run=given_limits.sharing.min_run)
    least = least_s(target, [node.token_ids for node in nodes], given_limits.repair, rates)
    if isinstance(plan, Plan) and plan.num_copied:
        assert least <= plan.estimate.shared_s + 1e-9


@given(st.integers(0, 2**32), any_limits(), any_rates())
@settings(max_examples=150, deadline=None)
def test_the_plan_is_the_same_as_with_every_composition(
    seed: int, given_limits: PlannerLimits, rates: Rates
) -> None:
    rng, tree = np.random.default_rng(seed), DeltaTree.open(None, identity="test")
    first = token_ids(rng.integers(0, _WORDS, int(rng.integers(300, 900))))
    between = edited(rng, first, int(rng.integers(1, 40)))
    exact_length = int(rng.integers(0, 30))
    nodes = [off_by(tree, between, exact_length, LIMIT / 20), stored(tree, first)]
    tokens = edited(rng, between, int(rng.integers(1, 40)))
    plan = made(tree, tokens, nodes, given_limits, rates)
    with patch.object(planner, "least_s", lambda *_: 0.0):
        assert made(tree, tokens, nodes, given_limits, rates) == plan


@given(
    st.integers(0, 2**32), st.booleans(), st.sampled_from([0.1, 1.0, 9.0]), st.sampled_from([None, 0.3, 0.5])
)
@settings(max_examples=200, deadline=None)
def test_the_plan_is_the_same_as_if_several_donors_were_composed_first(
    seed: int, can_probe: bool, off: float, least: float | None
) -> None:
    """Where plans of several are certified for no deviation, or if they repair much of the prompt."""
    rng, tree = np.random.default_rng(seed), DeltaTree.open(None, identity="test")
    own = certified(judged(LIMIT * off), most=LIMIT, regimes=("in_place", "moved"))
    given_limits = limits(own, own, can_probe=can_probe, max_risk=0.02)
    if least is not None:
        several = replace(certified(judged(LIMIT / 10), most=LIMIT), least_repaired=least)
        calibration = replace(given_limits.calibration, composed={"attention": several})
        given_limits = replace(given_limits, calibration=calibration)
    first = token_ids(rng.integers(0, _WORDS, int(rng.integers(300, 1500))))
    nodes, others = [stored(tree, first)], [first]
    for _ in range(int(rng.integers(1, 5))):
        others.append(edited(rng, others[int(rng.integers(len(others)))], int(rng.integers(1, 30))))
        nodes.append(off_by(tree, others[-1], int(rng.integers(0, 40)), LIMIT / 20))
    tokens = edited(rng, others[int(rng.integers(len(others)))], int(rng.integers(1, 30)))
    if rng.random() < 0.3:  # with a passage of another one
        tokens = token_ids(np.concatenate([tokens, others[-1][50:150], rng.integers(0, _WORDS, 30)]))
    rates = Rates.linear(prefill_tokens_per_s=1000.0, load_bytes_per_s=2e9, bytes_per_token=1)
    nodes = [nodes[place] for place in rng.permutation(len(nodes)).tolist()]
    plan = made(tree, tokens, nodes, given_limits, rates)
    with patch.object(planner._Search, "_composed_of_one", lambda *_: None):
        assert made(tree, tokens, nodes, given_limits, rates) == plan


def test_far_originals_are_not_composed() -> None:
    """A copy of a copy, each with many edits: the original is composed in vain."""
    rng, tree = np.random.default_rng(3), DeltaTree.open(None, identity="test")
    first = token_ids(rng.integers(0, _WORDS, 6000))
    between = edited(rng, first, 60)
    nodes = [off_by(tree, between, 0, LIMIT / 20), stored(tree, first)]
    given_limits = limits(judged(LIMIT / 4), judged(LIMIT / 4))
    rates = Rates.linear(prefill_tokens_per_s=1000.0, load_bytes_per_s=2e9, bytes_per_token=1)
    with patch.object(planner, "compose", wraps=compose) as composed:
        plan = made(tree, edited(rng, between, 60), nodes, given_limits, rates)
    assert isinstance(plan, Plan)
    assert plan.prediction is not None
    assert plan.prediction.inherited > 0
    assert composed.call_count == 1
