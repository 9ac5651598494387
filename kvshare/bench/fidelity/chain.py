"""
Edits of edits: a prompt that was shared many times over before it is measured.

    originals   every turn copies from where the KV was computed, as KVShare stores it
    re-saved    every turn saves its whole KV, and the next copies from that: what others do, for comparison
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from delta_tree import Copy
from kvshare.bench.fidelity.arms import Arms, described, measured_arm
from kvshare.bench.fidelity.layered import LayeredModel
from kvshare.bench.fidelity.rules.base import Rule, stretches
from kvshare.bench.fidelity.scenario import Prompt, Scenario
from kvshare.bench.fidelity.shelf import Prefill, Shelf, covered, prefill
from kvshare.bench.fidelity.trial import Outcome, Selection, Trial
from kvshare.settings import Settings
from kvshare.sharing.plan import Estimate, NoPlan, Plan, without

POLICIES = ("originals", "re-saved")


def measured_chain(scenario: Scenario, model: LayeredModel, settings: Settings, arms: Arms) -> dict[str, Any]:
    """The row of a chain: each rule, used in every turn, under both ways of storing."""
    first, truth = prefill(model, scenario.stored[0]), None
    row: dict[str, Any] = {}
    found = []
    for rule in arms.rules:
        for policy in POLICIES if rule.name != "full" else POLICIES[:1]:
            for budget in arms.budgets if rule.has_budget else (0.0,):
                trial = _last_turn(scenario, model, settings, first, rule, budget, policy)
                if truth is None:
                    truth, row = trial, described(trial)
                else:
                    trial.take_truth(truth)
                arm = measured_arm(trial, arms, rule, budget, "b", rule.choose(trial, budget))
                found.append({**arm, "rule": rule.name if policy == "originals" else f"{rule.name}/{policy}"})
    return {**row, "arms": found}


def _last_turn(
    scenario: Scenario,
    model: LayeredModel,
    settings: Settings,
    first: Prefill,
    rule: Rule,
    budget: float,
    policy: str,
) -> Trial:
    """The trial of the new prompt, behind all turns before it."""
    shelf = Shelf(settings.sharing)
    shelf.store_full(first)
    if rule.name != "full":
        for prompt in scenario.stages:
            _take_turn(prompt, scenario, model, settings, shelf, rule, budget, policy)
    return Trial(scenario, model, settings, shelf)


def _take_turn(
    prompt: Prompt,
    scenario: Scenario,
    model: LayeredModel,
    settings: Settings,
    shelf: Shelf,
    rule: Rule,
    budget: float,
    policy: str,
) -> None:
    """Serve one turn by the rule, and store it."""
    turn = Trial(_as_prompt(scenario, prompt), model, settings, shelf)
    selection = rule.choose(turn, budget)
    outcome = turn.run(selection, forced=False)
    plan = NoPlan("off") if policy == "re-saved" else _plan(turn, selection, outcome)
    shelf.store(prompt.token_ids, outcome.kv, plan)


def _as_prompt(scenario: Scenario, prompt: Prompt) -> Scenario:
    return replace(scenario, prompt=prompt, stages=(), candidates=())


def _plan(turn: Trial, selection: Selection, outcome: Outcome) -> Plan:
    """
    What was copied and computed, as the server would store it.

    A position that some layer did not compute stays a copy: it is as old as its oldest layer.
    """
    laid = _uppermost(turn.copies if selection.copies is None else selection.copies)
    is_laid = covered([copy.target for copy in laid], turn.num_tokens)
    is_exact = np.arange(turn.num_tokens) < turn.exact_length
    spans = tuple(stretches(~is_laid | (turn.base | outcome.computed) & ~is_exact))
    return Plan(
        num_tokens=turn.num_tokens,
        exact_length=turn.exact_length,
        copies=without(laid, spans),
        placeholders=spans,
        repairs=(),
        generation=1,
        estimate=Estimate(0.0, 0.0),
    )


def _uppermost(copies: Sequence[Copy]) -> tuple[Copy, ...]:
    """Ascending by target; where two cover a position, the later one lies on top."""
    found: list[Copy] = []
    for copy in copies:
        found = sorted((*without(found, [copy.target]), copy), key=lambda laid: laid.target_start)
    return tuple(found)
