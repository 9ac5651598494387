"""Which approximate plan is taken: by place, wider, chosen, or none, by what is expected of each."""

from dataclasses import replace
from pathlib import Path

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
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.node_draft import StoredSpan, computed_spans, draft_node
from kvshare.sharing.plan import NoPlan, Plan
from kvshare.sharing.planner import make_plan
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


def test_what_copies_carry_is_added_to_the_plans_own(tree: DeltaTree) -> None:
    node = off_by(tree, TOKENS, 300, LIMIT / 2)
    for own in (LIMIT / 4, LIMIT / 3):
        plan = planned(tree, limits(judged(own), judged(1.0)), EDITED, node)
        assert isinstance(plan, Plan)
        assert plan.prediction is not None
        assert plan.prediction.inherited == pytest.approx(LIMIT / 2)
        assert plan.deviation == pytest.approx(own + LIMIT / 2)


def test_what_copies_carry_is_weighted_by_how_much_is_copied(tree: DeltaTree) -> None:
    """A part from a prompt that deviates, a part from one that was computed in full."""
    node = off_by(tree, TOKENS, 0, LIMIT)
    full = stored(tree, prompt(900, seed=8))
    asked = token_ids(np.concatenate([prompt(30, seed=4), TOKENS[:340], full.token_ids]))
    plan = planned(tree, limits(judged(LIMIT / 4), judged(1.0)), asked, node, full)
    assert isinstance(plan, Plan)
    assert plan.prediction is not None
    share = plan.num_from[node.node_id] / plan.num_copied
    assert 0.2 < share < 0.4
    assert plan.prediction.inherited == pytest.approx(share * LIMIT)


def test_copies_carry_nothing_where_the_text_in_front_of_them_was_replaced(tree: DeltaTree) -> None:
    """Reordered passages did not deviate more in each turn: the plan's own shape has their new context."""
    node = off_by(tree, TOKENS, 0, LIMIT)
    asked = token_ids(np.concatenate([prompt(300, seed=4), TOKENS[1000:1340]]))
    plan = planned(tree, limits(judged(LIMIT / 4), judged(1.0)), asked, node)
    assert isinstance(plan, Plan)
    assert plan.prediction is not None
    assert (plan.decision, plan.prediction.inherited) == ("approx", 0)


def test_what_copies_carry_leaves_less_for_chosen_repairs(tree: DeltaTree) -> None:
    """The dose that is enough behind a full prefill is not enough behind a donor that deviates itself."""
    given = limits(judged(1.0), judged(LIMIT * 10**1.5, 1.0))
    clean = planned(tree, given)
    other = DeltaTree.open(None, identity="test")
    deviating = planned(other, given, EDITED, off_by(other, TOKENS, 0, LIMIT / 2))
    assert isinstance(clean, Plan)
    assert isinstance(deviating, Plan)
    assert clean.order is not None
    assert deviating.order is not None
    assert deviating.order.num_tokens > clean.order.num_tokens
    assert deviating.deviation <= LIMIT


def answered(tree: DeltaTree, tokens: TokenIds, plan: Plan | NoPlan) -> Node:
    """The node of a prompt that was computed by a plan."""
    spans = computed_spans(plan, len(tokens), 256)
    stored_spans = [StoredSpan(new_segment_id(), span, len(span)) for span in spans]
    return tree.insert(draft_node(tokens, plan, stored_spans, namespace="ns", parent=None)).node


def served_turns(tree: DeltaTree, given: PlannerLimits, num_turns: int) -> list[Plan]:
    """A prompt is computed in full, then edited further on turn by turn; each is the next one's donor."""
    tokens, plans = TOKENS, list[Plan]()
    node = answered(tree, tokens, NoPlan())
    for turn in range(num_turns):
        place = 60 + 45 * turn
        tokens = replaced(tokens, (place, place + 3), seed=turn)
        plan = planned(tree, given, tokens, node)
        assert isinstance(plan, Plan)
        plans.append(plan)
        node = answered(tree, tokens, plan)
        assert node.deviation == pytest.approx(plan.deviation)
    return plans


@pytest.mark.parametrize("own", [LIMIT / 12.5, LIMIT / 4.5, LIMIT * 0.8])
def test_a_long_chain_of_edits_is_computed_in_full_before_it_leaves_the_limit(
    tree: DeltaTree, own: float
) -> None:
    """Every turn adds its own; one that would be above the limit inherits nothing and hands nothing on."""
    plans = served_turns(tree, limits(judged(own), judged(1.0), can_probe=False), 20)
    expected, so_far = [], 0.0
    for _ in plans:
        so_far = so_far + own if so_far + own <= LIMIT else 0.0
        expected.append(so_far)
    assert [plan.deviation for plan in plans] == pytest.approx(expected)
    in_full = [plan for plan in plans if plan.decision == "exact"]
    assert 1 <= len(in_full) <= 10
    assert {plan.reason for plan in in_full} == {"deviates_too_much"}


def test_a_chat_keeps_its_own_kv_where_what_it_carries_leaves_no_room(tree: DeltaTree) -> None:
    """Most of the prompt is settled: only the moved text is computed, and not all that came before it."""
    node = off_by(tree, TOKENS, 300, LIMIT * 0.9)
    place = len(TOKENS) - 200
    asked = replaced(TOKENS, (place, place + 5))
    plan = planned(tree, limits(judged(LIMIT / 2), judged(1.0), can_probe=False), asked, node)
    assert isinstance(plan, Plan)
    assert (plan.decision, plan.reason, plan.num_copied) == ("approx", "deviates_too_much", place - 300)
    assert plan.deviation == pytest.approx(LIMIT * 0.9)


def test_a_full_donor_is_preferred_where_it_takes_hardly_longer(tree: DeltaTree) -> None:
    """It is one short edit further away than the newer prompt, which was edited itself."""
    full = stored(tree, TOKENS)
    once = replaced(TOKENS, (400, 405))
    newer = off_by(tree, once, 400, LIMIT / 4)
    twice = replaced(once, (1200, 1205))
    plan = planned(tree, limits(judged(LIMIT / 4), judged(1.0)), twice, newer, full)
    assert isinstance(plan, Plan)
    assert plan.donors == (full.node_id,)
    assert plan.deviation == pytest.approx(LIMIT / 4)


def test_a_full_donor_is_not_preferred_where_it_takes_much_longer(tree: DeltaTree) -> None:
    """Half of the prompt is not in it."""
    full = stored(tree, TOKENS[:1000])
    newer = off_by(tree, replaced(TOKENS, (400, 405)), 400, LIMIT / 4)
    plan = planned(tree, limits(judged(LIMIT / 4), judged(1.0)), EDITED, newer, full)
    assert isinstance(plan, Plan)
    assert newer.node_id in plan.donors
    assert plan.deviation > LIMIT / 4


def test_a_full_donor_is_used_where_the_others_deviate_too_much(tree: DeltaTree) -> None:
    """It has less in common, but with what the newer one carries, the limit would be exceeded."""
    full = stored(tree, TOKENS[:1000])
    newer = off_by(tree, replaced(TOKENS, (400, 405)), 400, LIMIT)
    plan = planned(tree, limits(judged(LIMIT * 0.9), judged(1.0), can_probe=False), EDITED, newer, full)
    assert isinstance(plan, Plan)
    assert (plan.decision, plan.donors) == ("approx", (full.node_id,))
    assert plan.deviation == pytest.approx(LIMIT * 0.9)


def test_a_store_that_is_opened_again_inherits_the_same(tmp_path: Path) -> None:
    given = limits(judged(LIMIT / 10), judged(1.0), can_probe=False)
    path = tmp_path / "store.sqlite"
    with DeltaTree.open(path, identity="test") as tree:
        served_turns(tree, given, 3)
        newest = list(tree.nodes())[-1]
        asked = replaced(newest.token_ids, (1900, 1903), seed=7)
        before = planned(tree, given, asked, newest)
    with DeltaTree.open(path, identity="test") as again:
        after = planned(again, given, asked, again.node(newest.node_id))
    assert isinstance(before, Plan)
    assert isinstance(after, Plan)
    assert before.prediction == after.prediction
    assert after.deviation > LIMIT / 10


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
