"""
Edits of edits: a prompt that was shared many times over before it is measured.

    originals   every turn copies from where the KV was computed, as KVShare stores it
    unrepaired  the same, but repairs are not stored: the next turn copies what they had replaced
    re-saved    every turn saves its whole KV, and the next copies from that: what others do, for comparison
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from delta_tree import Copy
from kvshare.bench.fidelity.arms import Arms, described, measured_arm
from kvshare.bench.fidelity.layered import LayeredModel
from kvshare.bench.fidelity.rules.base import Rule
from kvshare.bench.fidelity.scenario import Prompt, Scenario
from kvshare.bench.fidelity.shelf import Prefill, Shelf, covered, prefill
from kvshare.bench.fidelity.trial import Outcome, Selection, Trial
from kvshare.settings import Settings
from kvshare.sharing.plan import Estimate, NoPlan, Plan, without
from kvshare.sharing.selection import stretches

POLICIES = ("originals", "unrepaired", "re-saved")


def measured_chain(scenario: Scenario, model: LayeredModel, settings: Settings, arms: Arms) -> dict[str, Any]:
    """The row of a chain: each rule, used in every turn, under both ways of storing."""
    chain = _Chain(scenario, model, settings, prefill(model, scenario.stored[0]))
    truth, found = chain.last_turn(), []
    for rule in arms.rules:
        for policy, budget in product(POLICIES, arms.budgets if rule.has_budget else (0.0,)):
            if rule.name == "full" and policy != POLICIES[0]:
                continue
            trial = truth if rule.name == "full" else chain.served(rule, budget, policy)
            if trial is not truth:
                trial.take_truth(truth)
            arm = measured_arm(trial, arms, rule, budget, "b", rule.choose(trial, budget))
            found.append({**arm, "rule": rule.name if policy == POLICIES[0] else f"{rule.name}/{policy}"})
    return {**described(truth), "arms": found}


@dataclass(frozen=True, slots=True)
class _Chain:
    """A chain with its first prompt computed."""

    scenario: Scenario
    model: LayeredModel
    settings: Settings
    first: Prefill

    def last_turn(self, shelf: Shelf | None = None) -> Trial:
        """The trial of the new prompt; by default straight behind the first."""
        return Trial(self.scenario, self.model, self.settings, shelf or self._shelf())

    def served(self, rule: Rule, budget: float, policy: str) -> Trial:
        """The same behind all turns, each served by the rule and stored."""
        shelf = self._shelf()
        for prompt in self.scenario.stages:
            turn = Trial(_as_prompt(self.scenario, prompt), self.model, self.settings, shelf)
            selection = rule.choose(turn, budget)
            outcome = turn.run(selection, forced=False)
            shelf.store(prompt.token_ids, outcome.kv, _stored(turn, selection, outcome, policy))
        return self.last_turn(shelf)

    def _shelf(self) -> Shelf:
        shelf = Shelf(self.settings.sharing)
        shelf.store_full(self.first)
        return shelf


def _as_prompt(scenario: Scenario, prompt: Prompt) -> Scenario:
    return replace(scenario, prompt=prompt, stages=(), candidates=())


def _stored(turn: Trial, selection: Selection, outcome: Outcome, policy: str) -> Plan | NoPlan:
    """
    What was copied and computed, as the server would store it.

    A position that some layer did not compute stays a copy: it is as old as its oldest layer. What a probe
    pass computed over copies that were repaired later is not exact, even if nothing of them is left.
    """
    if policy == "re-saved":
        return NoPlan()
    laid = _uppermost(turn.copies if selection.copies is None else selection.copies)
    is_laid = covered([copy.target for copy in laid], turn.num_tokens)
    is_exact = np.arange(turn.num_tokens) < turn.exact_length
    fresh = turn.base | outcome.computed if policy == "originals" else turn.base
    spans = tuple(stretches(~is_laid | fresh & ~is_exact))
    first = int(turn.copied.argmax()) if turn.copied.any() else turn.num_tokens
    return Plan(
        num_tokens=turn.num_tokens,
        exact_length=turn.exact_length,
        copies=without(laid, spans),
        placeholders=spans,
        repairs=(),
        generation=1,
        estimate=Estimate(0.0, 0.0),
        exact_until=None if selection.kept is None else first,
    )


def _uppermost(copies: Sequence[Copy]) -> tuple[Copy, ...]:
    """Ascending by target; where two cover a position, the later one lies on top."""
    found: list[Copy] = []
    for copy in copies:
        found = sorted((*without(found, [copy.target]), copy), key=lambda laid: laid.target_start)
    return tuple(found)
