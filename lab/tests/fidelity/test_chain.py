"""Edits of edits: what a turn stores is what the next one copies."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from delta_tree import Copy, NodeId, SegmentId, Span, TokenIds, merge
from kvshare.sharing.plan import NoPlan, Plan, without
from kvshare.sharing.rates import Estimate
from kvshare_lab.fidelity.arms import POLICIES, _stored, _uppermost, measured, measured_chain
from kvshare_lab.fidelity.measures import divergence
from kvshare_lab.fidelity.rules import RULES
from kvshare_lab.fidelity.scenario import Prompt, Scenario
from kvshare_lab.fidelity.stored_prompts import StoredPrompts, prefill
from kvshare_lab.fidelity.trial import Trial
from lab.tests.fidelity.scenes import (
    CANDIDATES,
    QUESTION,
    SETTINGS,
    SYSTEM,
    TAIL,
    A,
    B,
    C,
    llama,
    places,
    prompt,
    replaced,
    scenario,
    stage,
    text,
    trial_of,
)

EDIT = 20
NAMES = ("full", "placeholders", "epic", "cacheblend")


def turn(number: int) -> Prompt:
    """One document more has another value in each turn; from the second on a note stands in front."""
    documents: list[TokenIds] = [
        replaced(document, EDIT) if place < number else document for place, document in enumerate((A, B, C))
    ]
    note = [text(90, 5)] if number > 1 else []
    return prompt(SYSTEM, *note, *documents, QUESTION)


def chain(depth: int) -> Scenario:
    """The stored prompt, depth - 1 turns, and the new prompt."""
    prompts = [turn(number) for number in range(depth + 1)]
    return scenario(prompts[:1], prompts[-1], stages=prompts[1:-1], candidates=CANDIDATES)


def by_rule(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {arm["rule"]: arm for arm in row["arms"]}


def test_one_turn_is_one_trial() -> None:
    """At depth 1 nothing was shared before: the same figures, under both ways of storing."""
    made = chain(1)
    row = measured_chain(made, llama(), SETTINGS, stage(*NAMES))
    found, expected = by_rule(row), by_rule(measured(trial_of(made), stage(*NAMES)))
    others = [f"{name}/{policy}" for name in NAMES[1:] for policy in POLICIES[1:]]
    assert set(found) == {*NAMES, *others}
    assert row["copied"] == trial_of(made).copied.sum()
    for name, arm in expected.items():
        assert found[name] == arm
        if name != "full":
            for other in (f"{name}/{policy}" for policy in POLICIES[1:]):
                assert found[other] == {**arm, "rule": other}


def test_resaved_copies_differ_from_originals_at_depth_three() -> None:
    """Re-saved prefixes count as exact, so that what is stale in front of the newest edit stays as it is."""
    found = by_rule(
        measured_chain(chain(3), llama(), SETTINGS, stage("full", "epic", "deviation", budgets=[0.4]))
    )
    assert found["full"]["kl"] <= 1e-6
    for name in ("epic", "deviation"):
        originals, resaved = found[name], found[f"{name}/re-saved"]
        assert originals["b"] > resaved["b"]
        assert originals["kl"] < 0.7 * resaved["kl"]


def test_a_whole_budget_is_a_full_prefill_at_any_depth() -> None:
    """Turns that compute all that is not exact leave exact KV behind."""
    found = by_rule(measured_chain(chain(3), llama(), SETTINGS, stage("epic", "cacheblend", budgets=[1.0])))
    assert len(found) == 6
    assert all(arm["kl"] <= 1e-6 for arm in found.values())


def test_repairs_that_are_not_stored_are_made_again() -> None:
    """The last turn copies what the first prompt had; with repairs stored, more of it is as it should be."""
    found = by_rule(measured_chain(chain(3), llama(), SETTINGS, stage("epic", budgets=[0.4])))
    stored, dropped = found["epic"], found["epic/unrepaired"]
    assert dropped["b"] == pytest.approx(stored["b"], abs=0.02)
    assert dropped["kl"] > stored["kl"]


def test_what_a_probe_pass_computed_is_not_exact_later() -> None:
    """Ours computes placeholders once, over what it repairs: the next exact prefix ends before them."""
    made = chain(2)
    for name in ("kvshare", "epic"):
        stored_prompts = StoredPrompts(SETTINGS.sharing)
        stored_prompts.store_full(prefill(llama(), turn(0)))
        first = Trial(scenario([], turn(1)), llama(), SETTINGS, stored_prompts)
        selection = RULES[name].choose(first, 0.3)
        done = first.run(selection, forced=False)
        stored_prompts.store(turn(1).token_ids, done.kv, _stored(first, selection, done, "originals"))
        again = Trial(scenario([], turn(1)), llama(), SETTINGS, stored_prompts)
        assert (again.exact_length == first.copied.argmax()) == (name == "kvshare"), made


def test_what_one_layer_left_out_is_not_exact() -> None:
    """CacheBlend's filter starts from every copied token: they stay approximate all the same."""
    made, budget = chain(3), 0.6
    found = by_rule(measured_chain(made, llama(), SETTINGS, stage("cacheblend", budgets=[budget])))[
        "cacheblend"
    ]
    assert found["b"] == pytest.approx(round(budget * len(made.prompt)) / len(made.prompt), abs=1e-5)


def third_turn(policy: str) -> Trial:
    """Behind two turns that were served with placeholders only, and stored one by one."""
    stored_prompts = StoredPrompts(SETTINGS.sharing)
    stored_prompts.store_full(prefill(llama(), turn(0)))
    for number in (1, 2):
        made = Trial(scenario([], turn(number)), llama(), SETTINGS, stored_prompts)
        done = made.run(RULES["placeholders"].choose(made, 0.0), forced=False)
        plan = NoPlan() if policy == "re-saved" else plan_of(made)
        stored_prompts.store(turn(number).token_ids, done.kv, plan)
    return Trial(scenario([], turn(3)), llama(), SETTINGS, stored_prompts)


def plan_of(made: Trial) -> Plan:
    """What the server would store of a turn without repairs."""
    spans = merge(Span(place, place + 1) for place in places(made.base))
    copies = without(made.copies, spans)
    return Plan(made.num_tokens, made.exact_length, copies, spans, (), 1, Estimate(0.0, 0.0))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_chain_is_its_turns_one_by_one(policy: str) -> None:
    """The figures of depth 3 are those of three trials over one store."""
    third = third_turn(policy)
    name = "placeholders" if policy == "originals" else f"placeholders/{policy}"
    found = by_rule(measured_chain(chain(3), llama(), SETTINGS, stage("placeholders")))[name]
    alone = third.run(RULES["placeholders"].choose(third, 0.0))
    assert found["kl"] == pytest.approx(divergence(third.truth, alone.log_probabilities).kl, rel=1e-3)
    assert found["charged"] == pytest.approx(alone.charged, abs=1e-5)


def test_a_layout_of_its_own_is_stored() -> None:
    """Where two copies cover a position, the later one lies on top, in the sequence and in what is stored."""
    low = Copy(NodeId(1), SegmentId(1), 0, 30, 10, 100, 100)
    high = Copy(NodeId(2), SegmentId(2), 5, 10, 20, 7, 7)
    found = [(copy.donor, copy.target, copy.offset) for copy in _uppermost([low, high])]
    assert found == [
        (low.donor, Span(10, 20), 0),
        (high.donor, Span(20, 30), 5),
        (low.donor, Span(30, 40), 20),
    ]
    assert _uppermost([high, low]) == (low,)


def test_originals_keep_where_their_kv_was_computed() -> None:
    """After two turns B stands five tokens further; its copies say from where, re-saved ones do not."""
    for policy, source in (("originals", len(SYSTEM) + len(A)), ("re-saved", len(SYSTEM) + 5 + len(A))):
        third = third_turn(policy)
        place = len(SYSTEM) + 5 + len(A)
        copy = next(
            copy for copy in third.copies if copy.target_start <= place < copy.target_start + copy.length
        )
        assert copy.source_position + place - copy.target_start == source
        assert third.num_tokens - TAIL > place


def test_only_originals_know_what_is_exact() -> None:
    """Up to the first note and edit; a re-saved prompt is taken for a prefill up to the newest edit."""
    originals, resaved = third_turn("originals"), third_turn("re-saved")
    assert originals.exact_length == len(SYSTEM) + 5
    assert resaved.exact_length == len(SYSTEM) + 5 + len(A) + len(B) + EDIT
    assert torch.equal(originals.truth, resaved.truth)
