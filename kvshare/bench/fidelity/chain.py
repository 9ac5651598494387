"""
Edits of edits: a prompt that was shared many times in a row before it is measured.

    originals   every turn copies from the place where the KV was computed, as KVShare stores it
    unrepaired  the same, but repairs are not stored: the next turn copies what they replaced
    re-saved    every turn saves its whole KV and the next one copies that; for comparison with other systems
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from delta_tree import Copy
from kvshare.bench.fidelity.arms import Decode, described, measured_arm
from kvshare.bench.fidelity.layered import LayeredModel
from kvshare.bench.fidelity.rules import RULES
from kvshare.bench.fidelity.rules.base import Rule
from kvshare.bench.fidelity.scenario import Scenario
from kvshare.bench.fidelity.shards import Stage
from kvshare.bench.fidelity.stored_prompts import Prefill, StoredPrompts, prefill
from kvshare.bench.fidelity.trial import Outcome, Selection, Trial
from kvshare.settings import Settings
from kvshare.sharing.plan import Estimate, NoPlan, Plan, without
from kvshare.sharing.selection import covered, stretches

POLICIES = ("originals", "unrepaired", "re-saved")


def measured_chain(
    scenario: Scenario, model: LayeredModel, settings: Settings, stage: Stage, *, decode: Decode = str
) -> dict[str, Any]:
    """The row of a chain: each rule, used in every turn, with each policy of storing; see `measured`."""
    chain = _Chain(scenario, model, settings, prefill(model, scenario.stored[0]))
    truth, arms = chain.trial(), []
    for rule in (RULES[name] for name in stage.rules):
        for policy, budget in product(POLICIES, stage.budgets if rule.has_budget else (0.0,)):
            if rule.name == "full" and policy != POLICIES[0]:
                continue
            trial = truth if rule.name == "full" else chain.trial(rule, budget, policy)
            if trial is not truth:
                trial.take_truth(truth)
            arm = measured_arm(trial, stage, rule, budget, "b", rule.choose(trial, budget), decode)
            arms.append({**arm, "rule": rule.name if policy == POLICIES[0] else f"{rule.name}/{policy}"})
    return {**described(truth), "arms": arms}


@dataclass(frozen=True, slots=True)
class _Chain:
    """A chain whose first prompt is computed."""

    scenario: Scenario
    model: LayeredModel
    settings: Settings
    first: Prefill

    def trial(self, rule: Rule | None = None, budget: float = 0.0, policy: str = "") -> Trial:
        """The trial of the new prompt after all turns, served by the rule; without a rule, after none."""
        stored = StoredPrompts(self.settings.sharing)
        stored.store_full(self.first)
        if rule is not None:
            for prompt in self.scenario.stages:
                scenario = replace(self.scenario, prompt=prompt, stages=(), candidates=())
                turn = Trial(scenario, self.model, self.settings, stored)
                selection = rule.choose(turn, budget)
                outcome = turn.run(selection, forced=False)
                stored.store(prompt.token_ids, outcome.kv, _stored(turn, selection, outcome, policy))
        return Trial(self.scenario, self.model, self.settings, stored)


def _stored(turn: Trial, selection: Selection, outcome: Outcome, policy: str) -> Plan | NoPlan:
    """
    The plan by which the server would store the turn: what was copied and what was computed.

    A position that some layer did not compute counts as a copy: it is as old as its oldest layer. What a
    probe pass computed over copies that were repaired later is not exact, even if none of those copies
    remains.
    """
    if policy == "re-saved":
        return NoPlan()
    copies = _uppermost(turn.copies if selection.copies is None else selection.copies)
    is_copied = covered([copy.target for copy in copies], turn.num_tokens)
    is_exact = np.arange(turn.num_tokens) < turn.exact_length
    fresh = turn.base | outcome.computed if policy == "originals" else turn.base
    spans = tuple(stretches(~is_copied | fresh & ~is_exact))
    first = int(turn.copied.argmax()) if turn.copied.any() else turn.num_tokens
    return Plan(
        num_tokens=turn.num_tokens,
        exact_length=turn.exact_length,
        copies=without(copies, spans),
        placeholders=spans,
        repairs=(),
        generation=1,
        estimate=Estimate(0.0, 0.0),
        exact_until=None if selection.computed is None else first,
    )


def _uppermost(copies: Sequence[Copy]) -> tuple[Copy, ...]:
    """Ascending by target and apart; where two cover a position, the later one counts."""
    found: list[Copy] = []
    for copy in copies:
        found = sorted((*without(found, [copy.target]), copy), key=lambda each: each.target_start)
    return tuple(found)
