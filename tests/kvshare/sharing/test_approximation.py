"""Which approximate plan is taken: by place, wider, chosen, or none, by what is expected of each."""

from dataclasses import replace

import numpy as np
import pytest

from delta_tree import (
    DeltaTree,
    Node,
    NodeDraft,
    Piece,
    PieceTable,
    Segment,
    TokenIds,
    new_segment_id,
    token_ids,
)
from kvshare.settings import load_settings
from kvshare.sharing.calibration import ModelCalibration, cautious
from kvshare.sharing.cost import Rates
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import PlannerLimits, make_plan
from kvshare.sharing.prediction import FEATURES, Calibration
from tests.kvshare.sharing.test_planner import prompt, replaced, stored

SETTINGS = load_settings()
RATES = Rates(prefill_tokens_per_s=1000.0, load_bytes_per_s=2e12, bytes_per_token=1)
LIMIT = SETTINGS.sharing.max_deviation


def judged(nats: float, repaired: float = 0.0) -> Calibration:
    """Every plan is off by so much, and `repaired` decades less with each unit of that feature."""
    weights = (*[0.0] * (len(FEATURES) - 1), -repaired)
    return Calibration(np.log10(nats), weights, (0.0,) * 9, (9.0,) * 9, bias=1.0, spread=0.0)


def limits(
    windows: Calibration, attention: Calibration, *, can_probe: bool = True, rule: str = "auto"
) -> PlannerLimits:
    return PlannerLimits(
        sharing=SETTINGS.sharing,
        repair=SETTINGS.repair.model_copy(update={"rule": rule}),
        calibration=ModelCalibration("m", "f", {"windows": windows, "attention": attention}, longest=9000),
        can_probe=can_probe,
    )


@pytest.fixture
def tree() -> DeltaTree:
    return DeltaTree.open(None, identity="test")


TOKENS = prompt(2000)
EDITED = replaced(TOKENS, (400, 410), (1200, 1210))


def planned(tree: DeltaTree, given: PlannerLimits, tokens: TokenIds = EDITED, *nodes: Node) -> Plan | NoPlan:
    donors = nodes or (stored(tree, TOKENS),)
    return make_plan(tokens, donors, tree.segment, approximate=True, limits=given, rates=RATES)


def test_windows_where_they_are_enough(tree: DeltaTree) -> None:
    plan = planned(tree, limits(judged(LIMIT / 2), judged(LIMIT / 9)))
    assert isinstance(plan, Plan)
    assert plan.order is None
    assert plan.num_repaired == 2 * SETTINGS.repair.edit_window + SETTINGS.repair.tail
    assert plan.prediction is not None
    assert plan.prediction.rule == "windows"
    assert plan.prediction.repaired == 2 * SETTINGS.repair.edit_window
    assert plan.deviation == pytest.approx(LIMIT / 2)


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


def off_by(tree: DeltaTree, tokens: TokenIds, exact_length: int, deviation: float) -> Node:
    """A stored prompt of which an end is approximate."""
    parts = [(0, exact_length, 0), (exact_length, len(tokens), 1)]
    segments = [
        Segment(new_segment_id(), "ns", start, end - start, generation, 1, 0)
        for start, end, generation in parts
        if end > start
    ]
    pieces = PieceTable([Piece(segment.segment_id, 0, segment.num_tokens) for segment in segments])
    draft = NodeDraft("ns", tokens, None, pieces, tuple(segments), exact_length, deviation)
    return tree.insert(draft).node


def test_a_chat_that_goes_on_deviates_no_further(tree: DeltaTree) -> None:
    """Its own approximate KV in its own context: nothing is repaired, nothing added, whatever edits cost."""
    node = off_by(tree, TOKENS, 300, LIMIT / 2)
    following = token_ids(np.concatenate([TOKENS, prompt(50, seed=4)]))
    plan = planned(tree, limits(judged(1.0), judged(1.0)), following, node)
    assert isinstance(plan, Plan)
    assert plan.deviation == LIMIT / 2
    assert (plan.num_copied, plan.num_repaired) == (1700, 0)
    assert plan.prediction is not None
    assert plan.prediction.rule == "none"


def test_an_edit_of_an_edit_is_as_far_off_as_the_worse_of_both(tree: DeltaTree) -> None:
    node = off_by(tree, TOKENS, 300, LIMIT / 2)
    for own, expected in ((LIMIT / 4, LIMIT / 2), (LIMIT * 3 / 4, LIMIT * 3 / 4)):
        plan = planned(tree, limits(judged(own), judged(1.0)), EDITED, node)
        assert isinstance(plan, Plan)
        assert plan.deviation == pytest.approx(expected)
        assert plan.prediction is not None
        assert plan.prediction.inherited == LIMIT / 2


def test_where_the_edit_is_too_far_off_a_prompts_own_kv_is_used_up_to_it(tree: DeltaTree) -> None:
    node = off_by(tree, TOKENS, 300, LIMIT / 2)
    plan = planned(tree, limits(judged(LIMIT * 2), judged(1.0)), EDITED, node)
    assert isinstance(plan, Plan)
    assert plan.reason == "deviates_too_much"
    assert (plan.exact_length, plan.num_copied) == (300, 100)


def test_exact_kv_of_an_approximate_prompt_is_not_off(tree: DeltaTree) -> None:
    """Only its first 1,000 tokens are copied, which are exact."""
    node = off_by(tree, TOKENS, 1000, LIMIT / 2)
    tokens = token_ids(np.concatenate([prompt(10, seed=4), TOKENS[:1000]]))
    plan = planned(tree, limits(judged(LIMIT / 4), judged(1.0)), tokens, node)
    assert isinstance(plan, Plan)
    assert plan.deviation == pytest.approx(LIMIT / 4)


def test_a_prompt_that_is_too_far_off_hides_no_other(tree: DeltaTree) -> None:
    """Only what is exact of it counts: the clean one behind it is copied from."""
    worse = off_by(tree, TOKENS[:1900], 300, 1e6)
    clean = stored(tree, TOKENS[:1500])
    given = limits(judged(LIMIT / 2), judged(LIMIT / 2))
    tokens = replaced(TOKENS[:1900], (400, 410))
    plan = planned(tree, given, tokens, worse, clean)
    assert isinstance(plan, Plan)
    assert plan.decision == "approx"
    assert clean.node_id in plan.donors
    assert plan.deviation == pytest.approx(LIMIT / 2)
    alone = planned(tree, given, tokens, worse)
    assert isinstance(alone, Plan)
    assert (alone.decision, alone.exact_length) == ("exact", 300)


def test_a_chats_own_kv_is_shared_where_the_rest_would_be_too_far_off(tree: DeltaTree) -> None:
    """The new turn's moved text is refused; its own approximate history is not computed again for that."""
    own = off_by(tree, TOKENS[:1000], 300, LIMIT / 2)
    tokens = token_ids(np.concatenate([TOKENS[:1000], prompt(30, seed=5), TOKENS[1500:]]))
    strangers = token_ids(np.concatenate([prompt(30, seed=6), TOKENS[1500:], prompt(30, seed=7)]))
    plan = planned(tree, limits(judged(1.0), judged(1.0)), tokens, own, stored(tree, strangers))
    assert isinstance(plan, Plan)
    assert (plan.exact_length, plan.num_copied) == (300, 700)
    assert (plan.deviation, plan.reason) == (LIMIT / 2, "deviates_too_much")


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
