"""The planner: pure, covers every position once, refuses with a reason."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tree import (
    DeltaTree,
    Node,
    Span,
    TokenIds,
    gaps,
    token_ids,
)
from kvshare.reasons import Reason
from kvshare.settings import load_settings
from kvshare.sharing.limits import MAX_GENERATION, PlannerLimits
from kvshare.sharing.plan import NoPlan, Plan, clip, without
from kvshare.sharing.planner import make_plan
from kvshare.sharing.rates import BLOCKS, LoadRate, Queue, Rates
from tests.kvshare.sharing.prompts import RATES, prompt, replaced, stored

SETTINGS = load_settings()
LIMITS = PlannerLimits(
    sharing=SETTINGS.sharing.model_copy(update={"max_risk": 1.0}),  # what is certified is no question here
    repair=SETTINGS.repair,
)


def plan_for(tree: DeltaTree, tokens: TokenIds, *nodes: Node, approximate: bool = True) -> Plan | NoPlan:
    return make_plan(tokens, nodes, tree.segment, approximate=approximate, limits=LIMITS, rates=RATES)


def assert_covers_once(plan: Plan) -> None:
    targets = [copy.target for copy in plan.copies]
    covered = sorted([*targets, *plan.placeholders])
    assert covered[0].start == 0
    assert covered[-1].end == plan.num_tokens
    for left, right in pairwise(covered):
        assert left.end == right.start
    assert plan.placeholders == gaps(targets, plan.num_tokens)


def test_an_equal_prompt_is_exact_but_for_its_last_token(tree: DeltaTree) -> None:
    """Full hit: everything is copied exactly, the last token is computed for its logits."""
    tokens = prompt(300)
    plan = plan_for(tree, tokens, stored(tree, tokens))
    assert isinstance(plan, Plan)
    assert plan.decision == "exact"
    assert plan.exact_length == 299
    assert plan.placeholders == (Span(299, 300),)
    assert (plan.num_recomputed, plan.num_repaired, plan.num_copied) == (0, 1, 0)


def test_edits_become_placeholders_with_a_window_behind_each(tree: DeltaTree) -> None:
    """Exact prefix, the edit and its repair window, a copy, the tail."""
    tokens = prompt(600)
    recipient = replaced(tokens, (200, 210), (400, 405))
    plan = plan_for(tree, recipient, stored(tree, tokens))
    assert isinstance(plan, Plan)
    assert_covers_once(plan)
    window, tail = SETTINGS.repair.edit_window, SETTINGS.repair.tail
    assert plan.decision == "approx"
    assert plan.exact_length == 200
    assert plan.placeholders == (
        Span(200, 210 + window),
        Span(400, 405 + window),
        Span(600 - tail, 600),
    )
    assert plan.num_recomputed == 15
    assert plan.num_repaired == 2 * window + tail
    assert plan.generation == 1
    assert plan.charged_budget == pytest.approx((15 + 2 * window + tail) / 600)


def test_exact_mode_takes_the_prefix_only(tree: DeltaTree) -> None:
    """Without approximation nothing behind the first difference is reused."""
    tokens = prompt(600)
    plan = plan_for(tree, replaced(tokens, (200, 210)), stored(tree, tokens), approximate=False)
    assert isinstance(plan, Plan)
    assert plan.decision == "exact"
    assert plan.placeholders == (Span(200, 600),)


def test_text_moved_by_an_insertion_is_copied_with_its_shift(tree: DeltaTree) -> None:
    """Everything behind an insertion keeps its KV, moved by the inserted length."""
    tokens = prompt(500)
    recipient = token_ids(np.concatenate([tokens[:100], prompt(7, seed=5), tokens[100:]]))
    plan = plan_for(tree, recipient, stored(tree, tokens))
    assert isinstance(plan, Plan)
    assert_covers_once(plan)
    assert {copy.shift for copy in plan.copies} == {0, 7}
    for copy in plan.copies:
        source = tokens[copy.source_position : copy.source_position + copy.length]
        assert np.array_equal(source, recipient[copy.target.start : copy.target.end])


def test_where_keys_cannot_be_moved_only_what_stands_where_it_stood_is_copied(tree: DeltaTree) -> None:
    """An edit in place leaves all behind it; an insertion leaves what is in front of it, and that is said."""
    old = prompt(600)
    node, limits = stored(tree, old), replace(LIMITS, can_move_keys=False)
    edited = replaced(old, (200, 210))
    inserted = token_ids(np.concatenate([edited[:400], prompt(30, seed=5), edited[400:]]))
    in_place, moved = (
        make_plan(tokens, [node], tree.segment, approximate=True, limits=limits, rates=RATES)
        for tokens in (edited, inserted)
    )
    assert isinstance(in_place, Plan)
    assert in_place.num_copied > 300
    assert isinstance(moved, Plan)
    assert all(copy.shift == 0 for copy in moved.copies)
    assert 100 < moved.num_copied < 200
    only_moved = make_plan(
        token_ids(np.concatenate([prompt(30, seed=6), old])),
        [node],
        tree.segment,
        approximate=True,
        limits=limits,
        rates=RATES,
    )
    assert isinstance(only_moved, NoPlan)
    assert only_moved.reason == "rotation_unknown"


def test_where_keys_cannot_be_moved_a_longer_run_elsewhere_takes_nothing_away(tree: DeltaTree) -> None:
    """One donor has the text further on, in one long run, the other has half of it where it stands."""
    text = prompt(400)
    further = stored(tree, token_ids(np.concatenate([prompt(50, seed=7), text])))
    here = stored(tree, replaced(text, (0, 4), (150, 160), (300, 310)))
    plan = make_plan(
        text,
        [further, here],
        tree.segment,
        approximate=True,
        limits=replace(LIMITS, can_move_keys=False),
        rates=RATES,
    )
    assert isinstance(plan, Plan)
    assert plan.donors == (here.node_id,)
    assert plan.num_copied > 200
    assert all(copy.shift == 0 for copy in plan.copies)


def test_two_donors_fill_each_others_gaps(tree: DeltaTree) -> None:
    """What one donor lacks comes from another."""
    first, second = prompt(300, seed=1), prompt(300, seed=2)
    recipient = token_ids(np.concatenate([prompt(20, seed=3), first, second]))
    nodes = [stored(tree, first), stored(tree, second)]
    anything = {"max_deviation": 9.0, "max_risk": 1.0}
    bold = replace(LIMITS, sharing=SETTINGS.sharing.model_copy(update=anything))
    plan = make_plan(recipient, nodes, tree.segment, approximate=True, limits=bold, rates=RATES)
    assert isinstance(plan, Plan)
    assert_covers_once(plan)
    assert set(plan.donors) == {node.node_id for node in nodes}
    assert plan.num_copied > 500


@pytest.mark.parametrize(
    ("recipient", "reason"),
    [
        (prompt(20), Reason.SHORT_PROMPT),
        (prompt(400, seed=7), Reason.NOTHING_IN_COMMON),
    ],
)
def test_refusals_have_a_reason(tree: DeltaTree, recipient: TokenIds, reason: Reason) -> None:
    """What cannot be shared is NoPlan with a fixed word, never an exception."""
    assert plan_for(tree, recipient, stored(tree, prompt(400))) == NoPlan(reason)


def test_the_few_tokens_that_all_chats_begin_with_are_no_plan(tree: DeltaTree) -> None:
    """An equal prefix shorter than min_run saves nothing worth mentioning."""
    tokens, other = prompt(200), np.array(prompt(200, seed=7))
    other[:10] = tokens[:10]
    assert plan_for(tree, token_ids(other), stored(tree, tokens)) == NoPlan(Reason.NOTHING_IN_COMMON)


def test_no_candidates_is_no_plan(tree: DeltaTree) -> None:
    """An empty nomination is the usual first case."""
    assert plan_for(tree, prompt(100)) == NoPlan(Reason.NO_CANDIDATES)


def test_a_plan_that_saves_too_little_falls_back_to_the_exact_prefix(tree: DeltaTree) -> None:
    """A short common stretch in a long new prompt is not worth the doubt."""
    tokens = prompt(400)
    recipient = token_ids(np.concatenate([tokens[:100], prompt(600, seed=8), tokens[300:360]]))
    plan = plan_for(tree, recipient, stored(tree, tokens))
    assert isinstance(plan, Plan)
    assert plan.decision == "exact"
    assert plan.exact_length == 100
    assert plan.reason == "not_enough_saved"


def test_a_plan_of_which_repair_leaves_nothing_is_none(tree: DeltaTree) -> None:
    """What is copied is computed again to its last token."""
    tokens = prompt(400)
    recipient = token_ids(np.concatenate([prompt(80, seed=8), tokens[200:218]]))
    plan = plan_for(tree, recipient, stored(tree, tokens))
    assert isinstance(plan, NoPlan)
    assert plan.reason == "not_enough_saved"


def test_a_plan_that_costs_more_than_it_saves_is_refused(tree: DeltaTree) -> None:
    """With a slow store, prefilling is cheaper than loading."""
    tokens = prompt(400)
    slow = Rates.linear(prefill_tokens_per_s=1e6, load_bytes_per_s=1e3, bytes_per_token=1000)
    nodes = [stored(tree, tokens)]
    recipient = replaced(tokens, (10, 20))
    plan = make_plan(recipient, nodes, tree.segment, approximate=True, limits=LIMITS, rates=slow)
    assert plan.reason == "does_not_pay"


def test_a_plan_may_pay_where_its_donor_lies_in_blocks(tree: DeltaTree) -> None:
    """And not where the same KV has to come from a slow host memory."""
    tokens = prompt(400)
    node = stored(tree, tokens)
    slow = Rates.linear(prefill_tokens_per_s=1e6, load_bytes_per_s=1e3, bytes_per_token=1000)
    rates = replace(slow, loads={**slow.loads, BLOCKS: LoadRate(0.0, 1e-12)})
    recipient, estimates = replaced(tokens, (10, 20)), []
    for in_blocks in (frozenset(node.pieces.segment_ids), frozenset()):
        now = replace(rates, queue=Queue(in_blocks=in_blocks))
        plan = make_plan(recipient, [node], tree.segment, approximate=True, limits=LIMITS, rates=now)
        estimates.append(plan.estimate.load_s if isinstance(plan, Plan) else plan.reason)
    assert estimates == [pytest.approx(0.0, abs=1e-6), "does_not_pay"]


def test_kv_of_a_deep_generation_is_not_copied(tree: DeltaTree) -> None:
    """Of copies of copies, and again, nobody has measured more than so many."""
    tokens = prompt(400)
    node = stored(tree, tokens, generation=MAX_GENERATION + 1)
    assert plan_for(tree, replaced(tokens, (100, 110)), node) == NoPlan(Reason.NOTHING_IN_COMMON)


def test_a_chat_on_approximate_kv_does_not_age_with_every_turn(tree: DeltaTree) -> None:
    """Its own earlier turns are copied in their own context: the generation stays; elsewhere it grows."""
    tokens = prompt(400)
    node = stored(tree, tokens, generation=1)
    next_turn = token_ids(np.concatenate([tokens, prompt(30, seed=4)]))
    going_on = plan_for(tree, next_turn, node)
    edited = plan_for(tree, replaced(tokens, (50, 60)), node)
    assert isinstance(going_on, Plan)
    assert isinstance(edited, Plan)
    assert (going_on.generation, edited.generation) == (1, 2)


def test_equal_inputs_give_equal_plans(tree: DeltaTree) -> None:
    """The planner is a pure function, and a plan can be hashed."""
    tokens = prompt(600)
    nodes = [stored(tree, replaced(tokens, (50 * k, 50 * k + 9), seed=k)) for k in range(1, 5)]
    first, second = (plan_for(tree, tokens, *nodes) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_plan_covers_every_position_once_and_copies_equal_tokens(data: st.DataObject) -> None:
    """For random donors cut from, shuffled from and mixed with the recipient."""
    tree = DeltaTree.open(None, identity="test")
    recipient = prompt(data.draw(st.integers(40, 400)), seed=data.draw(st.integers(0, 5)))
    nodes = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(recipient) - 20))
        end = data.draw(st.integers(start + 16, len(recipient)))
        head = prompt(data.draw(st.integers(0, 60)), seed=data.draw(st.integers(6, 9)))
        nodes.append(stored(tree, token_ids(np.concatenate([head, recipient[start:end]]))))
    plan = plan_for(tree, recipient, *nodes)
    if isinstance(plan, NoPlan):
        return
    assert_covers_once(plan)
    assert plan.placeholders[-1].end == len(recipient)
    by_id = {node.node_id: node for node in nodes}
    for copy in plan.copies:
        source = by_id[copy.donor].token_ids[copy.donor_start : copy.donor_start + copy.length]
        assert np.array_equal(source, recipient[copy.target.start : copy.target.end])
    total = plan.exact_length + plan.num_copied + plan.num_recomputed + plan.num_repaired
    assert total == len(recipient)


def test_cutting_holes_out_of_a_copy_keeps_the_rest_in_step(tree: DeltaTree) -> None:
    """Offset, source and target move together."""
    tokens = prompt(300)
    plan = plan_for(tree, tokens, stored(tree, tokens))
    assert isinstance(plan, Plan)
    copy = plan.copies[0]
    left, right = without([copy], [Span(50, 60), Span(290, 400)])
    assert (left.target, right.target) == (Span(0, 50), Span(60, 290))
    assert (right.offset, right.source_position, right.donor_start) == (60, 60, 60)
    assert clip(copy, Span(400, 500)) is None
