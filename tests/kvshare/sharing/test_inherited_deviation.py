"""What copies carry from donors that deviate themselves."""

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
from kvshare.sharing.limits import PlannerLimits
from kvshare.sharing.node_draft import StoredSpan, computed_spans, draft_node
from kvshare.sharing.plan import NoPlan, Plan
from tests.kvshare.sharing.judged_plans import EDITED, LIMIT, TOKENS, certified, judged, limits, planned
from tests.kvshare.sharing.prompts import prompt, replaced, stored


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


@pytest.mark.parametrize(("carried", "decision"), [(0.45, "approx"), (0.55, "full")])
def test_what_copies_carry_counts_twice_in_a_bound(tree: DeltaTree, carried: float, decision: str) -> None:
    """A chat that goes on behind its own approximate KV; the mean alone would be within the limit."""
    node = off_by(tree, TOKENS, 0, LIMIT * carried)
    following = token_ids(np.concatenate([TOKENS, prompt(50, seed=4)]))
    plan = planned(tree, limits(judged(1.0), judged(1.0), max_risk=0.02), following, node)
    assert (plan.decision if isinstance(plan, Plan) else "full") == decision
    if isinstance(plan, Plan):
        assert plan.prediction is not None
        assert plan.prediction.bound == pytest.approx(2 * plan.prediction.expected)


def test_what_copies_carry_is_added_to_a_bound(tree: DeltaTree) -> None:
    """Donors that use up half of the limit leave half for what is certified of the plan itself."""
    node = off_by(tree, TOKENS, 300, LIMIT / 4)
    for limit, decision in ((LIMIT / 2, "approx"), (LIMIT * 0.6, "exact")):
        each = certified(judged(LIMIT / 20), most=LIMIT, limit=limit)
        plan = planned(tree, limits(each, each, can_probe=False, max_risk=0.02), EDITED, node)
        assert isinstance(plan, Plan)
        assert plan.decision == decision
